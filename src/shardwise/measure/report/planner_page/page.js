// The controls: settings ↔ the hash of the address → questions to the server → the view.
//
// A setting is what `shardwise plan` calls it, as text: {cluster: "8xh200", recompute: "full", …}; "" is the default.
"use strict";

const plannerPage = (() => {
  const { element, gib, whole } = charts;
  const { offers } = JSON.parse(document.getElementById("planner-data").textContent);
  const at = (id) => document.getElementById(id);
  const BATCHES = [null, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512];
  const PRECISIONS = ["bf16", "fp16", "fp32"];
  const GIB = 2 ** 30;
  // While a slider moves, only quick answers are asked for.
  const REST_MS = 60;
  // What lives in host memory, as settings.
  const HOSTS = {
    none: { offload: "", update: "" },
    states: { offload: "states", update: "" },
    backward: { offload: "states", update: "backward" },
    all: { offload: "states,activations", update: "" },
  };
  // The settings that have a control, or belong to one.
  const CONTROLLED = ["model", "cluster", "micro_batch", "seq", "precision", "recompute", "offload", "update", "budget", "tokens", "price", "chosen"];
  let state = {}, shown = null;

  // ---- settings
  const fromHash = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const given = () => Object.fromEntries(Object.entries(state).filter(([name, value]) => value || offers.start[name]));
  // Browsers refuse to change the address very often.
  const toHash = () => history.replaceState(null, "", `#${new URLSearchParams(given())}`);

  const SHAPE = /^(?:(\d+)x)?(\d+)x([\w-]+)/;
  function cluster() {
    const [, nodes, each, device] = SHAPE.exec(state.cluster) ?? SHAPE.exec(offers.start.cluster);
    return { device, gpus: Number(nodes ?? 1) * Number(each), offered: offers.devices[device] ?? Object.values(offers.devices)[0] };
  }
  const counts = () => offers.counts.filter((count) => count <= offers.per_node || cluster().offered.has_fabric);
  const clusterOf = (gpus, device) => (gpus > offers.per_node ? `${gpus / offers.per_node}x${offers.per_node}x${device}` : `${gpus}x${device}`);
  const nearest = (stops, wanted) => stops.reduce((best, stop) => (Math.abs(stop - wanted) < Math.abs(best - wanted) ? stop : best), stops[0]);
  const host = () => Object.keys(HOSTS).find((name) => HOSTS[name].offload === (state.offload ?? "") && HOSTS[name].update === (state.update ?? "")) ?? "none";

  function seqStops() {
    if (!shown || shown.seq === null) return [];
    const stops = new Set([shown.seq]), longest = shown.longest ?? 0;
    for (let size = 128; size <= longest; size *= 2) { stops.add(size); if (size * 1.5 <= longest) stops.add(size * 1.5); }
    return [...stops].sort((one, other) => one - other);
  }

  // ---- controls
  const option = (value, text) => element("option", { value }, text ?? value);

  function slider(id, stops, value, text) {
    const input = at(id);
    let index = stops.indexOf(value);
    if (index < 0) index = stops.findIndex((stop) => stop !== null && stop >= value);
    input.max = Math.max(stops.length - 1, 0);
    input.value = index < 0 ? stops.length - 1 : index;
    input.disabled = stops.length < 2;
    input.setAttribute("aria-valuetext", text);
    at(`${id}-value`).textContent = text;
  }

  function showControls() {
    const { device, gpus, offered } = cluster(), nodes = gpus / offers.per_node, most = Math.ceil(offered.capacity_bytes / GIB);
    if (![...at("model").options].some(({ value }) => value === state.model)) at("model").prepend(option(state.model));
    at("model").value = state.model;
    at("folder").hidden = true;
    at("device").value = device;
    slider("gpus", counts(), gpus, nodes > 1 ? `${gpus} (${nodes} nodes)` : `${gpus}`);
    slider("batch", BATCHES, state.micro_batch ? Number(state.micro_batch) : null, state.micro_batch ? `${state.micro_batch} per GPU` : "most that fits");
    const seq = Number(state.seq) || (shown?.seq ?? null);
    slider("seq", seqStops(), seq, seq === null ? "fixed for this model" : `${whole.format(seq)} tokens`);
    const budget = Number.parseFloat(state.budget) || null;
    at("budget").max = most;
    at("budget").value = budget ?? most;
    const text = budget === null ? `all, ${gib(offered.capacity_bytes)}` : state.budget.replace("GiB", " GiB");
    at("budget").setAttribute("aria-valuetext", text);
    at("budget-value").textContent = text;
    at("precision").value = state.precision || "bf16";
    for (const input of at("recompute").querySelectorAll("input")) input.checked = input.value === (state.recompute || "");
    at("host").value = host();
    at("host-note").textContent = host() === "backward" ? "Gradients cannot be clipped by their norm then." : "";
    for (const id of ["tokens", "price"]) {
      at(`${id}-control`).hidden = shown !== null && shown.seq === null;
      if (document.activeElement !== at(id)) at(id).value = state[id] ?? "";
    }
    const { price } = offered;
    at("price").placeholder = price ? `${price[0]}` : "";
    at("price-note").textContent = price ? `Listed: $${price[0]}, ${price[1]}, ${price[2]}.` : "No price is listed for this GPU.";
    const others = Object.entries(given()).filter(([name, value]) => value && !CONTROLLED.includes(name));
    at("others").hidden = !others.length;
    at("others-text").textContent = `Also: ${others.map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ")}`;
  }

  function listen() {
    const change = (read) => (event) => { Object.assign(state, read(event.target)); update(); };
    const chosen = change(({ value }) => ({ model: value.trim(), seq: "", tokens: "", price: "", chosen: "" }));
    at("model").addEventListener("change", (event) => {
      if (event.target.value) return chosen(event);
      at("folder").hidden = false;
      return at("folder").focus();
    });
    at("folder").addEventListener("change", (event) => event.target.value.trim() && chosen(event));
    at("device").addEventListener("change", change(({ value }) => {
      const gpus = cluster().gpus;
      state.cluster = `1x${value}`;
      return { cluster: clusterOf(nearest(counts(), gpus), value), budget: "", price: "" };
    }));
    at("gpus").addEventListener("input", change(({ value }) => ({ cluster: clusterOf(counts()[value], cluster().device) })));
    at("batch").addEventListener("input", change(({ value }) => ({ micro_batch: BATCHES[value] === null ? "" : `${BATCHES[value]}` })));
    at("seq").addEventListener("input", change(({ value }) => ({ seq: `${seqStops()[value]}` })));
    at("budget").addEventListener("input", change(({ value, max }) => ({ budget: value === max ? "" : `${value}GiB` })));
    at("tokens").addEventListener("input", change(({ value }) => ({ tokens: value.trim().replaceAll(",", "") })));
    at("price").addEventListener("input", change(({ value }) => ({ price: value.trim() })));
    for (const id of ["precision", "recompute"]) at(id).addEventListener("change", change(({ value }) => ({ [id]: value })));
    at("host").addEventListener("change", change(({ value }) => HOSTS[value]));
    at("others-reset").addEventListener("click", change(() => Object.fromEntries(Object.keys(state).filter((name) => !CONTROLLED.includes(name)).map((name) => [name, ""]))));
    document.querySelector(".controls").addEventListener("submit", (event) => event.preventDefault());
    window.addEventListener("hashchange", () => { state = { ...offers.start, ...fromHash() }; update(); });
    at("download").addEventListener("click", () => save("plan.toml", shown.files[shown.chosen]));
    at("copy").addEventListener("click", copyLink);
    at("save").addEventListener("click", () => element("a", { href: `saved?${query({ chosen: state.chosen })}` }).click());
    at("export").addEventListener("click", exportPlan);
  }

  // ---- questions
  // A price alone costs nothing; without one, the listed price counts.
  function query(more = {}) {
    const { chosen, tokens, price, ...settings } = given();
    const listed = cluster().offered.price, cost = price || (listed ? `${listed[0]}` : "");
    return new URLSearchParams({ ...settings, ...(tokens && { tokens, ...(cost && { price: cost }) }), ...more });
  }

  async function ask(name, more = {}) {
    let answer;
    try {
      answer = await fetch(`${name}?${query(more)}`, { signal: stop.signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The server does not answer: shardwise plan --serve has ended.");
    }
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    return found;
  }

  // One question at a time: a change waits for a quick answer, and ends all others.
  const page = crypto.randomUUID();
  let newest = 0, asking = Promise.resolve(), stop = new AbortController(), isQuick = false;
  function update({ quick = true } = {}) {
    const turn = ++newest;
    if (!isQuick) stop.abort();
    showControls();
    asking = asking.then(() => (turn === newest ? answers(turn, { quick }) : null));
    return asking;
  }

  const rest = (signal) => new Promise((done) => { setTimeout(done, REST_MS); signal.addEventListener("abort", done); });

  async function answers(turn, { quick }) {
    stop = new AbortController();
    const began = performance.now(), chosen = { chosen: state.chosen ?? "", page };
    const isOld = () => turn !== newest;
    try {
      if (quick) {
        isQuick = true;
        const found = await ask("answer", { ...chosen, refined: 0 });
        isQuick = false;
        show(found, began);
        await rest(stop.signal);
        if (isOld()) return;
      }
      toHash();
      const found = await ask("answer", { ...chosen, refined: 1 });
      if (isOld()) return;
      show(found, began);
      const { frontier } = await ask("frontier", { page });
      if (isOld()) return;
      show({ ...found, frontier }, began);
    } catch (error) {
      if (error.name !== "AbortError" && !isOld()) refuse(error.message);
    } finally {
      isQuick = false;
    }
  }

  function show(found, began) {
    shown = { ...found, milliseconds: performance.now() - began, before: shown?.is_quick ? shown.milliseconds : null };
    document.querySelector(".results").classList.remove("rough");
    // As with `shardwise plan --save`, a plan that does not fit cannot be downloaded.
    for (const id of ["download", "export"]) at(id).disabled = found.plan.candidates[found.chosen].fits === "no";
    showControls();
    view.draw(shown);
  }

  function refuse(why) {
    const box = at("verdict");
    box.classList.add("refused");
    box.classList.remove("rough");
    box.querySelector("h2").textContent = "This cannot be planned";
    at("why").textContent = why;
    at("also").textContent = "";
    at("ways").replaceChildren();
    for (const id of ["download", "export"]) at(id).disabled = true;
    document.querySelector(".results").classList.add("rough");
  }

  const view = answerView({
    onChoose({ name }) {
      state.chosen = name;
      update({ quick: false }).then(() => document.querySelector(`#memory-chart [data-strategy="${name}"]`)?.focus());
    },
    onApply(setting) {
      Object.assign(state, setting, { chosen: "" });
      update();
    },
  });

  // ---- files and links
  const say = (text) => { at("said").textContent = text; };

  function save(name, text) {
    const url = URL.createObjectURL(new Blob([text], { type: "application/octet-stream" }));
    element("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
    say(`${name}: ${shown.labels[shown.chosen]}.`);
  }

  async function copyLink() {
    try {
      await navigator.clipboard.writeText(location.href);
      say("Link copied: it holds all settings, for as long as this server runs.");
    } catch {
      say("The browser did not allow copying; the address bar has the link.");
    }
  }

  async function exportPlan() {
    try {
      const found = await ask("export", { to: at("target").value, chosen: state.chosen ?? "" });
      for (const [name, text] of Object.entries(found.files)) save(name, text);
      if (found.left_out.length) say(found.left_out.join(" "));
    } catch (error) {
      say(error.message);
    }
  }

  at("model").append(...offers.models.map((name) => option(name)), option("", "another: hf:DIR …"));
  at("device").append(...Object.entries(offers.devices).map(([name, { title }]) => option(name, title)));
  at("precision").append(...PRECISIONS.map((name) => option(name)));
  at("target").append(...offers.targets.map((name) => option(name)));
  state = { ...offers.start, ...fromHash() };
  listen();
  update();
  return { get shown() { return shown; }, get state() { return state; }, get settled() { return asking; } };
})();
