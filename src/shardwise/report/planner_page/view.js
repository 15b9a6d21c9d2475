// What the page shows: verdict, numbers, charts and tables. `page`: {hardware, state, training, shown, choose(row), apply(change)}.
"use strict";

const pageView = (page) => {
  const { element, gib, significant, whole, seconds, fitWords } = charts;
  const at = (id) => document.getElementById(id);
  const GIB = 2 ** 30;
  const speed = (time) => (time.tokensPerSecondPerDevice === null ? [time.samplesPerSecond, "samples/s"] : [time.tokensPerSecondPerDevice, "tokens/s/GPU"]);
  const hostWords = {
    none: "nothing in host memory", states: "states in host memory", backward: "states in host memory, updated inside backward",
    all: "states and activations in host memory",
  };
  const share = (part) => `${(100 * part).toFixed(part < 0.0995 ? 1 : 0).replace(".0", "")}%`;
  const title = () => page.hardware.devices[page.state.device].title || page.state.device;

  const usesHost = () => page.shown.asked.host !== "none";
  // Host memory of a node, which all of its GPUs fill together.
  const hostBytes = (one) => one.host * Math.min(page.shown.asked.count, page.hardware.per_node);

  function draw() {
    const { planner, rows, chosen, found } = page.shown, { model } = planner;
    at("title").textContent = `${model.name} on ${page.state.gpus} × ${title()}`;
    const size = model.num_params >= 1e9 ? `${significant(model.num_params / 1e9)} billion` : `${significant(model.num_params / 1e6)} million`;
    const facts = [`${size} parameters`, "bf16", "AdamW", "predicted, not measured"];
    at("facts").replaceChildren(...facts.map((fact) => element("span", {}, fact)));
    drawVerdict();
    drawNumbers();
    // As with `shardwise plan --save`, a plan that does not fit cannot be downloaded.
    at("download").disabled = chosen.fits === "no";
    at("export").disabled = chosen.fits === "no";
    const capacity = planner.capacity(page.shown.asked);
    charts.key(at("memory-key"), [...model.categories.map((name) => [name]), ["unused", "reserved, unused"], ["context"]]);
    charts.memoryBars(at("memory-chart"), { rows, categories: model.categories, capacity, chosen, onChoose: page.choose });
    drawStep();
    // The frontier is computed later; the old one stays until then.
    at("frontier-chart").classList.toggle("rough", page.shown.isRough);
    const hostHead = usesHost() ? ["host GiB per node"] : [], hostCells = (one) => (usesHost() ? [(hostBytes(one) / GIB).toFixed(1)] : []);
    charts.table(at("table"), ["strategy", "mesh", "micro-batch", "peak GiB", ...hostHead, "fits", "step", speed(chosen.time)[1], "exposed comm.", "MFU"],
      found.map((one) => ({ chosen: one === chosen, cells: [one.strategy, `${one.mesh.replicate}×${one.mesh.shard}`, `${one.batch}`, (one.device / GIB).toFixed(1), ...hostCells(one), fitWords[one.fits],
        seconds(one.time.seconds), significant(speed(one.time)[0]), share(one.time.exposed / one.time.seconds), one.time.mfu === null ? "–" : share(one.time.mfu)] })));
    at("command").textContent = command();
    // Not every model of images has linear layers in its blocks.
    at("lora").hidden = model.seq === null;
    at("lora-command").textContent = command(["--lora 16", "--quantize nf4"]);
  }

  function drawVerdict() {
    const { recommended, ways, planner, isRough } = page.shown, box = at("verdict"), heading = box.querySelector("h2");
    // Screen readers announce it when it is exact.
    box.setAttribute("aria-busy", isRough);
    for (const id of ["verdict", "numbers"]) at(id).classList.toggle("rough", isRough);
    box.classList.toggle("refused", !recommended);
    at("ways").replaceChildren(...ways.filter((way) => way.isOffered).map(wayButton));
    if (!recommended) {
      const [least] = [...page.shown.found].sort((one, other) => one.device - other.device);
      heading.textContent = "Nothing fits with these settings";
      at("why").textContent = `The smallest, ${least.strategy}, needs ${gib(least.device)} per GPU; ${gib(planner.capacity(page.shown.asked))} may be used.`;
      at("also").textContent = isRough ? "" : `${waysText(ways)} Gradients in 16 bits, and host memory for some layers only, may fit as well, which this page does not compute: ${command(["--strategy auto"])}`;
      return;
    }
    const { best, first, fitting } = recommended, mesh = best.mesh.replicate > 1 ? ` on a ${best.mesh.replicate}×${best.mesh.shard} mesh` : "";
    const doubt = best.fits === "tight" ? " It may not fit: the peak is within the error band of the limit." : "";
    heading.replaceChildren("Use ", element("em", {}, best.strategy), `${mesh}, micro-batch ${best.batch}`);
    const reason = fitting.length < 2 ? "The only strategy that fits." : page.state.gpus === 1 ? "The simplest strategy: one GPU has nothing to shard."
      : first === best ? "The fastest strategy that fits." : nearlyFastestText(best, first);
    at("why").textContent = `${reason} ${communicationText(best)}${doubt}`;
    at("also").textContent = [simplerText(best, first), hostText()].filter(Boolean).join(" ");
  }

  // What the page leaves out: a choice for each layer, and updates inside backward.
  function hostText() {
    if (!usesHost()) return "";
    return `Here all layers use host memory. To let only as many use it as are needed: ${command(["--strategy auto", "--update auto"], { withHost: false })}`;
  }

  function wayButton(way) {
    const button = element("button", { type: "button" }, `Use ${changeText(way.change)}`);
    button.addEventListener("click", () => page.apply(way.change));
    return button;
  }

  // Percentages are of the fastest, in whole percent, as in the terminal.
  const slowerShare = (one, first) => Math.round(100 * (1 - one.time.samplesPerSecond / first.time.samplesPerSecond));

  function nearlyFastestText(best, first) {
    const slower = slowerShare(best, first);
    if (slower === 0) return `As fast as ${first.strategy}, and simpler.`;
    return `${slower}% slower than ${first.strategy}, the fastest, and simpler (${share(page.hardware.pair_band)} or less is within the error).`;
  }

  function waysText(ways) {
    if (!ways.length) return "It does not fit with recompute full, host memory or any number of GPUs of this page either.";
    const unlinked = ways.every((way) => way.isOffered) ? "" : " How machines with this GPU are linked is not known, so the page has no speed for them.";
    return `It fits with ${ways.map(wayText).join("; or with ")}.${unlinked}`;
  }

  function wayText({ change, best }) {
    const host = change.host && change.host !== "none" ? ` and ${gib(hostBytes(best))} of host memory` : "";
    return `${changeText(change)}: ${best.strategy}, micro-batch ${best.batch}, ${gib(best.device)}${host}`;
  }

  function changeText({ recompute, host, batch, count }) {
    const parts = [host && host !== page.state.host && hostWords[host], count && `${count} GPUs`, recompute && recompute !== page.state.recompute && `recompute ${recompute}`, batch === null && page.state.batch !== null && "a smaller micro-batch", batch === 1 && page.state.batch !== 1 && "micro-batch 1"];
    return parts.filter(Boolean).join(" and ");
  }

  function communicationText({ time }) {
    if (page.state.gpus === 1) return "";
    const part = `${seconds(time.exposed)} of ${seconds(time.seconds)}`;
    const what = usesHost() ? "communication and host memory" : "communication";
    return time.exposed < 0.05 * time.seconds ? `Communication is hidden behind computation (${part} exposed).` : `${part} of each step are spent waiting for ${what}.`;
  }

  // Why a simpler strategy is not recommended.
  function simplerText(best, first) {
    const simpler = page.shown.rows.find((row) => STRATEGIES.indexOf(row.strategy) < STRATEGIES.indexOf(best.strategy));
    if (!simpler) return "";
    if (simpler.fits === "no" || (simpler.fits === "tight" && best.fits === "yes")) return `${simpler.strategy} needs ${gib(simpler.device)}; ${gib(page.shown.planner.capacity(page.shown.asked))} may be used.`;
    return `${simpler.strategy} is ${slowerShare(simpler, first)}% slower${simpler.batch < best.batch ? ` with micro-batch ${simpler.batch}, the most that fits` : ""}.`;
  }

  function drawNumbers() {
    const { chosen, planner } = page.shown, { time } = chosen, [rate, unit] = speed(time), capacity = planner.capacity(page.shown.asked);
    const tile = (name, value, more) => element("div", {}, element("dt", {}, name), element("dd", {}, value, " ", element("small", {}, more)));
    at("numbers").replaceChildren(
      tile(`Throughput of ${chosen.strategy}`, significant(rate), unit),
      tile("Step time", seconds(time.seconds), `± ${share(time.band)}`),
      tile("Peak per GPU", gib(chosen.device), `of ${gib(capacity)}`),
      ...(usesHost() ? [tile("Host memory per node", gib(hostBytes(chosen)), "")] : []),
      tile("Global batch", whole.format(chosen.batch * page.state.gpus), page.state.seq === null ? "samples" : `× ${whole.format(page.state.seq)} tokens`),
      tile("Model FLOPs utilisation", time.mfu === null ? "–" : share(time.mfu), ""),
      ...trainingTiles(tile),
    );
  }

  // Days and cost, without failures and evaluations.
  function trainingTiles(tile) {
    const { training } = page;
    if (!training || page.shown.chosen.fits === "no") return [];
    const { days, gpuHours, cost } = page.shown.planner.trainingCost(page.shown.chosen, page.shown.asked, training);
    const length = days >= 1 ? [significant(days), "days"] : days * 24 >= 1 ? [significant(days * 24), "hours"] : [significant(days * 1440), "minutes"];
    return [tile("Training time", length[0], length[1]), ...(cost === null ? [] : [tile("Cost", `$${whole.format(Math.max(1, Math.round(cost)))}`, `${significant(gpuHours)} GPU-hours`)])];
  }

  // The step that is drawn; it is mostly the same for exact numbers as for the rough ones before.
  let drawnStep = "";
  function drawStep() {
    const { chosen, planner, asked } = page.shown, step = JSON.stringify([planner.model.name, asked, chosen.label, chosen.batch]);
    if (step === drawnStep) return;
    drawnStep = step;
    const spans = planner.timeline(chosen, asked);
    const total = chosen.time.seconds, sends = new Set(spans.filter((span) => span[0] === stepTime.SENT).map((span) => span[1].split(" ")[0]));
    at("step-title").textContent = `One step of ${chosen.label}`;
    charts.key(at("step-key"), [["forward"], ["backward"], ["update", "optimizer update"], ["copy", "copies and casts"], ...(sends.has("gather") ? [["gather", "gather parameters"]] : []), ...(sends.has("reduce") ? [["reduce", "reduce gradients"]] : []), ...(usesHost() ? [["host", `updates${page.shown.asked.host === "all" ? " and activations" : ""} in host memory`], ["loads", "loads from host memory"]] : [])]);
    at("step-chart").classList.add("lanes");
    charts.lanes(at("step-chart"), { spans, total, kinds: stepTime });
    const bound = chosen.time.cpuSeconds > 0.9 * chosen.time.seconds ? " The CPU that launches kernels bounds this step." : "";
    at("step-note").textContent = `${usesHost() ? "Waiting for communication and host memory" : "Exposed communication"}: ${seconds(chosen.time.exposed)} (${share(chosen.time.exposed / chosen.time.seconds)} of the step).${bound}`;
  }

  function drawFrontier() {
    if (!page.shown.frontier) return;
    const points = page.shown.frontier.map(({ budget, best }) => ({ budget, value: best ? speed(best.time)[0] : null,
      label: best ? `${best.strategy}, recompute ${best.recompute}, micro-batch ${best.batch}` : "nothing fits" }));
    const [, unit] = speed(page.shown.chosen.time);
    charts.frontier(at("frontier-chart"), { points, unit, now: points[points.length - 1] });
    charts.table(at("frontier-table"), ["budget", "plan", unit], points.map(({ budget, label, value }) => ({ cells: [gib(budget), label, value === null ? "–" : significant(value)] })));
  }

  // `options`: what the page cannot compute, and the command can. `withHost`: with the choice for host memory.
  function command(options = [], { withHost = true } = {}) {
    const { per_node: perNode } = page.hardware, nodes = page.state.gpus / perNode;
    const cluster = nodes > 1 ? `${nodes}x${perNode}x${page.state.device}` : `${page.state.gpus}x${page.state.device}`;
    const { model } = page.shown.planner;
    const parts = ["shardwise plan", model.name, `--cluster ${cluster}`, page.state.recompute !== "none" && `--recompute ${page.state.recompute}`, ...(withHost ? HOSTS[page.state.host] : []), page.state.batch !== null && `--micro-batch ${page.state.batch}`,
      page.state.seq !== null && page.state.seq !== model.seq && `--seq ${page.state.seq}`, page.state.budget !== null && `--budget ${page.state.budget}GiB`,
      page.training && `--tokens ${page.state.tokens.trim().replaceAll(",", "")}`, page.training?.price && `--price ${page.training.price}`, ...options, "--save plan.toml"];
    return parts.filter(Boolean).join(" ");
  }

  return { draw, drawFrontier };
};
