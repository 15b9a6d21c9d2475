// The controls: settings ↔ the hash of the address → the planner → the view.
"use strict";

const plannerPage = (() => {
  const { element, gib, whole } = charts;
  const data = JSON.parse(document.getElementById("planner-data").textContent), { hardware, server } = data;
  const at = (id) => document.getElementById(id);
  const BATCHES = [null, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512];
  const GIB = 2 ** 30;
  const planners = new Map(), packed = new Map();
  for (let number = 0; at(`model-${number}`); number++) {
    const text = at(`model-${number}`).textContent;
    // Models are large, so each is parsed when it is first used.
    packed.set(/"name":"([^"]*)"/.exec(text)[1], text);
  }
  let state = {}, shown = null;

  // ---- settings
  const longest = (model) => model.longest ?? 0;
  function seqStops(model) {
    if (model.seq === null) return [];
    const stops = new Set([model.seq]);
    for (let size = 128; size <= longest(model); size *= 2) { stops.add(size); if (size * 1.5 <= longest(model)) stops.add(size * 1.5); }
    return [...stops].filter((size) => size <= longest(model)).sort((one, other) => one - other);
  }
  const nearest = (stops, wanted) => stops.reduce((best, stop) => (Math.abs(stop - wanted) < Math.abs(best - wanted) ? stop : best), stops[0]);
  const counts = () => hardware.counts.filter((count) => count <= hardware.per_node || hardware.devices[state.device].fabric);
  const capacityGib = () => hardware.devices[state.device].capacity / GIB;

  function settings() {
    return { device: state.device, count: state.gpus, recompute: state.recompute, host: state.host, seq: state.seq, batch: state.batch,
      budget: state.budget === null ? null : state.budget * GIB };
  }

  // "2B" → 2e9, as the command line reads it; null if it is no number.
  const SUFFIXES = { "": 1, k: 1e3, m: 1e6, b: 1e9, t: 1e12 };
  function count(text) {
    const found = /^([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)([kmbt]?)$/i.exec((text ?? "").trim().replaceAll(",", ""));
    const value = found ? Number(found[1]) * SUFFIXES[found[2].toLowerCase()] : 0;
    return value > 0 && value < 1e18 ? value : null;
  }
  const listedPrice = () => hardware.devices[state.device].price?.[0] ?? null;
  // What is to be trained; null without a number of tokens, or if samples are not counted in tokens.
  function training() {
    const tokens = state.seq === null ? null : count(state.tokens);
    return tokens && { tokens, price: state.price ?? listedPrice() };
  }

  // The settings that were asked for, limited to what the page offers.
  function checked(asked) {
    const names = [...packed.keys(), ...(server ? server.models : [])];
    state = { ...state, model: names.includes(asked.model) ? asked.model : names[0], device: hardware.offered.includes(asked.device) ? asked.device : hardware.offered[0] };
    const model = planners.get(state.model)?.model;
    state.gpus = nearest(counts(), Number(asked.gpus) || 8);
    state.batch = asked.batch && asked.batch !== "auto" && Number(asked.batch) >= 1 ? Math.min(Math.round(Number(asked.batch)), MOST_BATCH) : null;
    state.recompute = RECOMPUTES.includes(asked.recompute) ? asked.recompute : "none";
    state.host = Object.hasOwn(HOSTS, asked.host) && offersHost(hardware, settings()) ? asked.host : "none";
    const budget = Math.round(Number(asked.budget));
    state.budget = budget >= 1 && budget < capacityGib() ? budget : null;
    state.plan = asked.plan || null;
    state.tokens = count(asked.tokens) ? asked.tokens : "";
    state.price = Number(asked.price) > 0 && Number(asked.price) < 1e6 ? Number(asked.price) : null;
    const seq = Math.round(Number(asked.seq));
    state.seq = !model ? asked.seq : model.seq === null ? null : seq >= 1 && seq <= longest(model) ? seq : model.seq;
  }

  const fromHash = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  function toHash() {
    const { model, device, gpus, batch, seq, recompute, host, budget, plan, tokens, price } = state;
    const given = { model, device, gpus, batch: batch ?? "auto", recompute, ...(host !== "none" && { host }), ...(seq && { seq }), ...(budget && { budget }), ...(plan && { plan }), ...(tokens && { tokens }), ...(price && { price }) };
    history.replaceState(null, "", `#${new URLSearchParams(given)}`);
  }

  // ---- controls
  function option(value, text) { return element("option", { value }, text ?? value); }

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

  function showControls(model) {
    at("model").value = state.model;
    at("device").value = state.device;
    const nodes = state.gpus / hardware.per_node;
    slider("gpus", counts(), state.gpus, nodes > 1 ? `${state.gpus} (${nodes} nodes)` : `${state.gpus}`);
    slider("batch", BATCHES, state.batch, state.batch === null ? "most that fits" : `${state.batch} per GPU`);
    slider("seq", seqStops(model), state.seq, state.seq === null ? "fixed for this model" : `${whole.format(state.seq)} tokens`);
    const most = Math.ceil(capacityGib());
    at("budget").max = most;
    at("budget").value = state.budget ?? most;
    const text = state.budget === null ? `all, ${gib(hardware.devices[state.device].capacity)}` : `${state.budget} GiB`;
    at("budget").setAttribute("aria-valuetext", text);
    at("budget-value").textContent = text;
    for (const input of at("recompute").querySelectorAll("input")) input.checked = input.value === state.recompute;
    at("host").value = state.host;
    at("host").disabled = !offersHost(hardware, settings());
    at("host-note").textContent = at("host").disabled ? `For up to ${hardware.per_node} GPUs; the command computes it for more.`
      : state.host === "backward" ? "Gradients cannot be clipped by their norm then." : "";
    for (const id of ["tokens", "price"]) at(`${id}-control`).hidden = state.seq === null;
    if (document.activeElement !== at("tokens")) at("tokens").value = state.tokens;
    if (document.activeElement !== at("price")) at("price").value = state.price ?? "";
    const listed = hardware.devices[state.device].price;
    at("price").placeholder = listed ? `${listed[0]}` : "";
    at("price-note").textContent = listed ? `Listed: $${listed[0]}, ${listed[1]}, ${listed[2]}.` : "No price is listed for this GPU.";
  }

  function listen() {
    const change = (read) => (event) => { read(event.target); update(); };
    at("model").addEventListener("change", change((target) => { state.model = target.value; state.plan = null; }));
    at("device").addEventListener("change", change((target) => { state.device = target.value; }));
    at("gpus").addEventListener("input", change((target) => { state.gpus = counts()[target.value]; }));
    at("batch").addEventListener("input", change((target) => { state.batch = BATCHES[target.value]; }));
    at("seq").addEventListener("input", change((target) => { state.seq = seqStops(shown.planner.model)[target.value]; }));
    at("budget").addEventListener("input", change((target) => { state.budget = Number(target.value) >= capacityGib() ? null : Number(target.value); }));
    at("tokens").addEventListener("input", change((target) => { state.tokens = target.value; }));
    at("price").addEventListener("input", change((target) => { state.price = Number(target.value) || null; }));
    for (const id of ["recompute", "host"]) at(id).addEventListener("change", change((target) => { state[id] = target.value; }));
    document.querySelector(".controls").addEventListener("submit", (event) => event.preventDefault());
    window.addEventListener("hashchange", () => { checked(fromHash()); update(); });
    window.addEventListener("resize", () => shown && view.drawFrontier());
    at("download").addEventListener("click", () => save("plan.toml", plan()));
    at("copy").addEventListener("click", copyLink);
    listenToFiles();
  }

  // ---- the planner
  async function plannerOf(name) {
    if (!planners.has(name)) {
      const model = packed.has(name) ? JSON.parse(packed.get(name)) : await ask(`model?name=${encodeURIComponent(name)}`);
      planners.set(name, new Planner(hardware, model));
    }
    return planners.get(name);
  }

  async function ask(path, options) {
    const answer = await fetch(path, options), found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    return found;
  }

  function apply({ count, ...change }) {
    Object.assign(state, count ? { gpus: count } : {}, change);
    update();
  }

  // One row per strategy, on its best mesh; on the one with the smallest peak if none fits.
  function byStrategy(planner, found, asked) {
    return planner.strategies(asked).map((strategy) => {
      const own = found.filter((one) => one.strategy === strategy);
      return planner.best(own)?.best ?? own.reduce((least, one) => (one.device < least.device ? one : least));
    });
  }

  async function update() {
    let planner = planners.get(state.model);
    if (!planner) {
      const wanted = state.model;
      say(packed.has(wanted) ? "" : `Reading ${wanted} …`);
      try {
        planner = await plannerOf(wanted);
      } catch (error) {
        say(`${wanted}: ${error.message}`);
        return;
      }
      if (state.model !== wanted) return;
      say("");
    }
    checked({ ...state, batch: state.batch ?? "auto", seq: state.seq });
    const began = performance.now(), asked = settings();
    show(planner, asked, planner.candidates(asked, { quick: true }), { isRough: true });
    shown.milliseconds = performance.now() - began;
    settled = refine(planner, asked, { own: ++turn, began });
    await settled;
  }

  // Computes the tensors alone at once; then, unless a control has moved, the allocator's model and the frontier.
  let turn = 0, settled = null;
  // Lets the browser draw and handle input. Sent as a message, since chained time-outs wait at least 4 ms each.
  const channel = new MessageChannel();
  const pause = () => new Promise((done) => { channel.port1.onmessage = done; channel.port2.postMessage(null); });
  async function refine(planner, asked, { own, began }) {
    const found = [], cluster = planner.cluster(asked);
    for (const strategy of planner.strategies(asked)) {
      for (const mesh of planner.meshes(strategy, cluster)) {
        await pause();
        if (own !== turn) return;
        found.push(planner.cost(strategy, mesh, asked));
      }
    }
    show(planner, asked, found, { isRough: false });
    shown.milliseconds = performance.now() - began;
    await pause();
    if (own !== turn) return;
    // Only now, since browsers change the address slowly, and refuse to do it too often.
    toHash();
    const points = [];
    for (const budget of planner.budgets(asked)) {
      await pause();
      if (own !== turn) return;
      points.push({ budget, best: planner.fastest(asked, budget) });
    }
    shown.frontier = points;
    view.drawFrontier();
  }

  function show(planner, asked, found, { isRough }) {
    const recommended = planner.best(found);
    const rows = byStrategy(planner, found, asked).map((row) => Object.assign(row, { label: row.mesh.replicate > 1 ? `${row.strategy} ${row.mesh.replicate}×${row.mesh.shard}` : row.strategy }));
    const chosen = rows.find((row) => row.strategy === state.plan) ?? (recommended && rows.find((row) => row.strategy === recommended.best.strategy)) ?? rows[rows.length - 1];
    const frontier = shown && shown.planner === planner ? shown.frontier : null;
    const ways = recommended || isRough ? [] : planner.waysOut(asked);
    shown = { planner, asked, found, rows, recommended, chosen, frontier, ways, isRough };
    draw();
  }

  const plan = () => shown.planner.toml(shown.chosen, shown.asked, data.plan);

  const view = pageView({ hardware, choose, apply, get training() { return training(); }, get state() { return state; }, get shown() { return shown; } });
  const draw = () => { showControls(shown.planner.model); view.draw(); };

  function choose(row) {
    state.plan = shown.recommended && row.strategy === shown.recommended.best.strategy ? null : row.strategy;
    shown.chosen = row;
    toHash();
    draw();
    document.querySelector(`#memory-chart [data-strategy="${row.strategy}"]`).focus();
  }

  // ---- files, links, the server
  const say = (text) => { at("said").textContent = text; };

  function save(name, text) {
    const url = URL.createObjectURL(new Blob([text], { type: "application/octet-stream" }));
    const link = element("a", { href: url, download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
    say(`${name}: ${shown.chosen.strategy}, micro-batch ${shown.chosen.batch}.`);
  }

  async function copyLink() {
    try {
      await navigator.clipboard.writeText(location.href);
      say("Link copied: it holds all settings.");
    } catch {
      say("The browser did not allow copying; the address bar has the link.");
    }
  }

  function listenToFiles() {
    const drop = at("drop");
    at("config").addEventListener("change", () => readConfig(at("config").files[0]));
    for (const kind of ["dragover", "dragleave", "drop"]) {
      drop.addEventListener(kind, (event) => {
        event.preventDefault();
        drop.classList.toggle("over", kind === "dragover");
        if (kind === "drop") readConfig(event.dataTransfer.files[0]);
      });
    }
    if (!server) at("config-note").textContent = "This page cannot trace a model: it has no PyTorch. Run shardwise plan --serve, and drop the file there.";
  }

  async function readConfig(file) {
    if (!file) return;
    if (!server) {
      at("config-note").textContent = `${file.name} needs to be traced with PyTorch, which this page cannot do. Run: shardwise plan --serve, and drop it there; or: shardwise plan hf:FOLDER --cluster ${state.gpus}x${state.device}`;
      return;
    }
    at("config-note").textContent = `Tracing ${file.name} …`;
    try {
      const model = await ask("trace", { method: "POST", headers: { "Content-Type": "application/json" }, body: await file.text() });
      planners.set(model.name, new Planner(hardware, model));
      packed.set(model.name, "");
      at("model").append(option(model.name));
      Object.assign(state, { model: model.name, plan: null });
      at("config-note").textContent = `${model.name} was traced with ${whole.format(model.seq)} tokens per sample.`;
      update();
    } catch (error) {
      at("config-note").textContent = error.message;
    }
  }

  function offerExports() {
    if (!server) return;
    document.querySelector(".exports").hidden = false;
    at("target").append(...server.targets.map((name) => option(name)));
    at("export").addEventListener("click", async () => {
      try {
        const found = await ask(`export?to=${at("target").value}&gpus=${state.gpus}`, { method: "POST", headers: { "Content-Type": "application/toml" }, body: plan() });
        for (const [name, text] of Object.entries(found.files)) save(name, text);
        if (found.left_out.length) say(found.left_out.join(" "));
      } catch (error) {
        say(error.message);
      }
    });
  }

  function begin() {
    const names = [...packed.keys(), ...(server ? server.models.filter((name) => !packed.has(name)) : [])];
    at("model").append(...names.map((name) => option(name)));
    at("device").append(...hardware.offered.map((name) => option(name, hardware.devices[name].title || name)));
    offerExports();
    listen();
    checked({ ...data.start, ...fromHash() });
    update();
  }

  begin();
  return { get shown() { return shown; }, get state() { return state; }, get settled() { return settled; }, plan, plannerOf, hardware };
})();
