// The controls: settings ↔ the address's hash → the planner → what is drawn.
"use strict";

const plannerPage = (() => {
  const { element, gib, significant, whole, seconds, fitWords } = charts;
  const data = JSON.parse(document.getElementById("planner-data").textContent), { hardware, server } = data;
  const at = (id) => document.getElementById(id);
  const BATCHES = [null, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512];
  const GIB = 2 ** 30;
  const planners = new Map(), packed = new Map();
  for (let number = 0; at(`model-${number}`); number++) {
    const text = at(`model-${number}`).textContent;
    // Models are large: each is read when it is first asked for.
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
    return { device: state.device, count: state.gpus, recompute: state.recompute, seq: state.seq, batch: state.batch,
      budget: state.budget === null ? null : state.budget * GIB };
  }

  // What was asked for, as far as it can be had.
  function checked(asked) {
    const names = [...packed.keys(), ...(server ? server.models : [])];
    state = { ...state, model: names.includes(asked.model) ? asked.model : names[0], device: hardware.offered.includes(asked.device) ? asked.device : hardware.offered[0] };
    const model = planners.get(state.model)?.model;
    state.gpus = nearest(counts(), Number(asked.gpus) || 8);
    state.batch = asked.batch && asked.batch !== "auto" && Number(asked.batch) >= 1 ? Math.min(Math.round(Number(asked.batch)), MOST_BATCH) : null;
    state.recompute = RECOMPUTES.includes(asked.recompute) ? asked.recompute : "none";
    const budget = Math.round(Number(asked.budget));
    state.budget = budget >= 1 && budget < capacityGib() ? budget : null;
    state.plan = asked.plan || null;
    const seq = Math.round(Number(asked.seq));
    state.seq = !model ? asked.seq : model.seq === null ? null : seq >= 1 && seq <= longest(model) ? seq : model.seq;
  }

  const fromHash = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  function toHash() {
    const { model, device, gpus, batch, seq, recompute, budget, plan } = state;
    const given = { model, device, gpus, batch: batch ?? "auto", recompute, ...(seq && { seq }), ...(budget && { budget }), ...(plan && { plan }) };
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
  }

  function listen() {
    const change = (read) => (event) => { read(event.target); update(); };
    at("model").addEventListener("change", change((target) => { state.model = target.value; state.plan = null; }));
    at("device").addEventListener("change", change((target) => { state.device = target.value; }));
    at("gpus").addEventListener("input", change((target) => { state.gpus = counts()[target.value]; }));
    at("batch").addEventListener("input", change((target) => { state.batch = BATCHES[target.value]; }));
    at("seq").addEventListener("input", change((target) => { state.seq = seqStops(shown.planner.model)[target.value]; }));
    at("budget").addEventListener("input", change((target) => { state.budget = Number(target.value) >= capacityGib() ? null : Number(target.value); }));
    at("recompute").addEventListener("change", change((target) => { state.recompute = target.value; }));
    document.querySelector(".controls").addEventListener("submit", (event) => event.preventDefault());
    window.addEventListener("hashchange", () => { checked(fromHash()); update(); });
    window.addEventListener("resize", () => shown && drawFrontier());
    at("download").addEventListener("click", () => save("plan.toml", plan()));
    at("copy").addEventListener("click", copyLink);
    at("apply").addEventListener("click", () => { Object.assign(state, shown.way.change.count ? { gpus: shown.way.change.count } : {}, shown.way.change.recompute ? { recompute: shown.way.change.recompute } : {}, "batch" in shown.way.change ? { batch: shown.way.change.batch } : {}); update(); });
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

  // One row per strategy: of several meshes the one that is taken, or the smallest where none fits.
  function byStrategy(planner, found) {
    return STRATEGIES.map((strategy) => {
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
    settled = refine(planner, asked, ++turn);
    await settled;
  }

  // First the tensors alone, at once; then, unless a control has moved, with the allocator's model, and the frontier.
  let turn = 0, settled = null;
  const pause = () => new Promise((done) => setTimeout(done));
  async function refine(planner, asked, own) {
    const found = [], cluster = planner.cluster(asked);
    for (const strategy of STRATEGIES) {
      for (const mesh of planner.meshes(strategy, cluster)) {
        await pause();
        if (own !== turn) return;
        found.push(planner.cost(strategy, mesh, asked));
      }
    }
    // Only now: browsers are slow to change the address, and refuse to if it is asked too often.
    toHash();
    show(planner, asked, found, { isRough: false });
    const points = [];
    for (const budget of planner.budgets(asked)) {
      await pause();
      if (own !== turn) return;
      points.push({ budget, best: planner.fastest(asked, budget) });
    }
    shown.frontier = points;
    drawFrontier();
  }

  function show(planner, asked, found, { isRough }) {
    const recommended = planner.best(found);
    const rows = byStrategy(planner, found).map((row) => Object.assign(row, { label: row.mesh.replicate > 1 ? `${row.strategy} ${row.mesh.replicate}×${row.mesh.shard}` : row.strategy }));
    const chosen = rows.find((row) => row.strategy === state.plan) ?? (recommended && rows.find((row) => row.strategy === recommended.best.strategy)) ?? rows[rows.length - 1];
    const frontier = shown && shown.planner === planner ? shown.frontier : null;
    const way = recommended || isRough ? null : planner.wayOut(asked);
    shown = { planner, asked, found, rows, recommended, chosen, frontier, way, isRough };
    draw();
  }

  const plan = () => shown.planner.toml(shown.chosen, shown.asked, data.plan);

  // ---- what is shown
  const speed = (time) => (time.tokensPerSecondPerDevice === null ? [time.samplesPerSecond, "samples/s"] : [time.tokensPerSecondPerDevice, "tokens/s/GPU"]);
  const share = (part) => `${(100 * part).toFixed(part < 0.0995 ? 1 : 0).replace(".0", "")}%`;
  const title = () => hardware.devices[state.device].title || state.device;

  function draw() {
    const { planner, rows, chosen, found } = shown, { model } = planner;
    showControls(model);
    at("title").textContent = `${model.name} on ${state.gpus} × ${title()}`;
    const size = model.num_params >= 1e9 ? `${significant(model.num_params / 1e9)} billion` : `${significant(model.num_params / 1e6)} million`;
    const facts = [`${size} parameters`, "bf16", "AdamW", "predicted, not measured"];
    at("facts").replaceChildren(...facts.map((fact) => element("span", {}, fact)));
    drawVerdict();
    drawNumbers();
    // As `shardwise plan --save`, which writes no plan that does not fit.
    at("download").disabled = chosen.fits === "no";
    at("export").disabled = chosen.fits === "no";
    const capacity = planner.capacity(shown.asked);
    charts.key(at("memory-key"), [...model.categories.map((name) => [name]), ["unused", "reserved, unused"], ["context"]]);
    charts.memoryBars(at("memory-chart"), { rows, categories: model.categories, capacity, chosen, onChoose: choose });
    drawStep();
    // It is computed later, and stays until then.
    at("frontier-chart").classList.toggle("rough", shown.isRough);
    charts.table(at("table"), ["strategy", "mesh", "micro-batch", "peak GiB", "fits", "step", speed(chosen.time)[1], "exposed comm.", "MFU"],
      found.map((one) => ({ chosen: one === chosen, cells: [one.strategy, `${one.mesh.replicate}×${one.mesh.shard}`, `${one.batch}`, (one.device / GIB).toFixed(1), fitWords[one.fits],
        seconds(one.time.seconds), significant(speed(one.time)[0]), share(one.time.exposed / one.time.seconds), one.time.mfu === null ? "–" : share(one.time.mfu)] })));
    at("command").textContent = command();
  }

  function choose(row) {
    state.plan = shown.recommended && row.strategy === shown.recommended.best.strategy ? null : row.strategy;
    shown.chosen = row;
    toHash();
    draw();
    document.querySelector(`#memory-chart [data-strategy="${row.strategy}"]`).focus();
  }

  function drawVerdict() {
    const { recommended, way, planner, isRough } = shown, box = at("verdict"), heading = box.querySelector("h2");
    // Announced when it is exact.
    box.setAttribute("aria-busy", isRough);
    for (const id of ["verdict", "numbers"]) at(id).classList.toggle("rough", isRough);
    box.classList.toggle("refused", !recommended);
    at("apply").hidden = !way;
    if (!recommended) {
      const [least] = [...shown.found].sort((one, other) => one.device - other.device);
      heading.textContent = "Nothing fits with these settings";
      at("why").textContent = `The smallest, ${least.strategy}, needs ${gib(least.device)} per GPU; ${gib(planner.capacity(shown.asked))} may be used.`;
      at("also").textContent = isRough ? "" : way ? `It fits with ${changeText(way.change)}: ${way.best.strategy}, micro-batch ${way.best.batch}, ${gib(way.best.device)}.` : "It does not fit with recompute full on any number of GPUs of this page either.";
      if (way) at("apply").textContent = `Use ${changeText(way.change)}`;
      return;
    }
    const { best, first, fitting } = recommended, mesh = best.mesh.replicate > 1 ? ` on a ${best.mesh.replicate}×${best.mesh.shard} mesh` : "";
    const doubt = best.fits === "tight" ? " It may not fit: the peak is within the error band of the limit." : "";
    heading.replaceChildren("Use ", element("em", {}, best.strategy), `${mesh}, micro-batch ${best.batch}`);
    const reason = first !== best ? `The simplest strategy within ${share(planner.hardware.pair_band)} of the fastest (${first.strategy}, ${share(first.time.samplesPerSecond / best.time.samplesPerSecond - 1)} faster).`
      : fitting.length > 1 ? "The fastest strategy that fits." : "The only strategy that fits.";
    at("why").textContent = `${reason} ${communicationText(best)}${doubt}`;
    at("also").textContent = simplerText(best);
  }

  function changeText({ recompute, batch, count }) {
    const parts = [count && `${count} GPUs`, recompute && recompute !== state.recompute && `recompute ${recompute}`, batch === null && state.batch !== null && "a smaller micro-batch", batch === 1 && state.batch !== 1 && "micro-batch 1"];
    return parts.filter(Boolean).join(" and ");
  }

  function communicationText({ time }) {
    if (state.gpus === 1) return "One GPU has nothing to communicate.";
    const part = `${seconds(time.exposed)} of ${seconds(time.seconds)}`;
    return time.exposed < 0.05 * time.seconds ? `Communication is hidden behind computation (${part} exposed).` : `${part} of each step are exposed communication.`;
  }

  // What a simpler strategy lost by.
  function simplerText(best) {
    const simpler = shown.rows.find((row) => STRATEGIES.indexOf(row.strategy) < STRATEGIES.indexOf(best.strategy));
    if (!simpler) return "";
    if (simpler.fits === "no" || (simpler.fits === "tight" && best.fits === "yes")) return `${simpler.strategy} needs ${gib(simpler.device)}; ${gib(shown.planner.capacity(shown.asked))} may be used.`;
    return `${simpler.strategy} is ${share(1 - simpler.time.samplesPerSecond / best.time.samplesPerSecond)} slower${simpler.batch < best.batch ? ` with micro-batch ${simpler.batch}, the most that fits` : ""}.`;
  }

  function drawNumbers() {
    const { chosen, planner } = shown, { time } = chosen, [rate, unit] = speed(time), capacity = planner.capacity(shown.asked);
    const tile = (name, value, more) => element("div", {}, element("dt", {}, name), element("dd", {}, value, " ", element("small", {}, more)));
    at("numbers").replaceChildren(
      tile(`Throughput of ${chosen.strategy}`, significant(rate), unit),
      tile("Step time", seconds(time.seconds), `± ${share(time.band)}`),
      tile("Peak per GPU", gib(chosen.device), `of ${gib(capacity)}`),
      tile("Global batch", whole.format(chosen.batch * state.gpus), state.seq === null ? "samples" : `× ${whole.format(state.seq)} tokens`),
      tile("Model FLOPs utilisation", time.mfu === null ? "–" : share(time.mfu), ""),
    );
  }

  function drawStep() {
    const { chosen, planner, asked } = shown, spans = planner.timeline(chosen, asked);
    const total = chosen.time.seconds, sends = new Set(spans.filter((span) => span[0] === stepTime.SENT).map((span) => span[1].split(" ")[0]));
    at("step-title").textContent = `One step of ${chosen.label}`;
    charts.key(at("step-key"), [["forward"], ["backward"], ["update", "optimizer update"], ["copy", "copies and casts"], ...(sends.has("gather") ? [["gather", "gather parameters"]] : []), ...(sends.has("reduce") ? [["reduce", "reduce gradients"]] : [])]);
    at("step-chart").classList.add("lanes");
    charts.lanes(at("step-chart"), { spans, total, kinds: stepTime });
    const bound = chosen.time.cpuSeconds > 0.9 * chosen.time.seconds ? " The CPU that launches kernels bounds this step." : "";
    at("step-note").textContent = `Exposed communication: ${seconds(chosen.time.exposed)} (${share(chosen.time.exposed / chosen.time.seconds)} of the step).${bound}`;
  }

  function drawFrontier() {
    if (!shown.frontier) return;
    const points = shown.frontier.map(({ budget, best }) => ({ budget, value: best ? speed(best.time)[0] : null,
      label: best ? `${best.strategy}, recompute ${best.recompute}, micro-batch ${best.batch}` : "nothing fits" }));
    const [, unit] = speed(shown.chosen.time);
    charts.frontier(at("frontier-chart"), { points, unit, now: points[points.length - 1] });
    charts.table(at("frontier-table"), ["budget", "plan", unit], points.map(({ budget, label, value }) => ({ cells: [gib(budget), label, value === null ? "–" : significant(value)] })));
  }

  function command() {
    const { per_node: perNode } = hardware, nodes = state.gpus / perNode;
    const cluster = nodes > 1 ? `${nodes}x${perNode}x${state.device}` : `${state.gpus}x${state.device}`;
    const { model } = shown.planner;
    const parts = ["shardwise plan", model.name, `--cluster ${cluster}`, state.recompute !== "none" && `--recompute ${state.recompute}`, state.batch !== null && `--micro-batch ${state.batch}`,
      state.seq !== null && state.seq !== model.seq && `--seq ${state.seq}`, state.budget !== null && `--budget ${state.budget}GiB`, "--save plan.toml"];
    return parts.filter(Boolean).join(" ");
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
