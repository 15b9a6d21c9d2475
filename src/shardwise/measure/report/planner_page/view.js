// What the page shows of an answer of the server: verdict, numbers, charts and tables. All numbers are Python's.
"use strict";

const answerView = ({ onChoose = null, onApply = null } = {}) => {
  const { element, gib, significant, whole, seconds, fitWords } = charts;
  const at = (id) => document.getElementById(id);
  const GIB = 2 ** 30;
  const share = (part) => `${(100 * part).toFixed(part < 0.0995 ? 1 : 0).replace(".0", "")}%`;
  const speed = (one) => (one.tokens_per_s_per_gpu === null ? [one.samples_per_s, "samples/s"] : [one.tokens_per_s_per_gpu, "tokens/s/GPU"]);
  const categories = (one) => Object.keys(one.breakdown_bytes);
  let shown = null;

  const candidates = () => shown.plan.candidates;
  const chosen = () => candidates()[shown.chosen];
  // Host memory of a node, which all of its GPUs fill together.
  const hostBytes = (one) => one.host_bytes * shown.cluster.per_node;
  const usesHost = () => candidates().some((one) => one.host_bytes > 0);

  function draw(answer) {
    shown = answer;
    const { plan, cluster } = shown;
    at("title").textContent = `${plan.model} on ${cluster.num_ranks} × ${shown.title}`;
    const size = shown.num_params >= 1e9 ? `${significant(shown.num_params / 1e9)} billion` : `${significant(shown.num_params / 1e6)} million`;
    const facts = [`${size} parameters`, chosen().precision, `recompute ${chosen().recompute}`, shown.optimizer, "predicted, not measured"];
    at("facts").replaceChildren(...facts.map((fact) => element("span", {}, fact)));
    drawVerdict();
    drawNumbers();
    drawMemory();
    drawStep();
    drawTable();
    at("remarks").replaceChildren(...shown.remarks.map((line) => element("li", {}, line.replace(/^- /, ""))));
    at("command").textContent = shown.command;
    at("toml").textContent = shown.files[shown.chosen];
    // Not every model of images has linear layers in its blocks.
    at("lora").hidden = shown.seq === null || shown.command.includes("--lora");
    at("lora-command").textContent = `${shown.command} --lora 16 --quantize nf4`;
    // The frontier comes after the answer; the old one stays until then.
    at("frontier-chart").classList.toggle("rough", !shown.frontier);
    if (shown.frontier) drawFrontier();
  }

  function drawVerdict() {
    const { plan, labels, ways } = shown, box = at("verdict"), heading = box.querySelector("h2"), best = plan.recommended;
    // Screen readers announce it when it is exact.
    box.setAttribute("aria-busy", shown.is_quick);
    for (const id of ["verdict", "numbers"]) at(id).classList.toggle("rough", shown.is_quick);
    box.classList.toggle("refused", best === null);
    // The ways out are buttons here.
    const why = plan.why.replace(/; what does, [^;]*:$/, "");
    at("why").textContent = `${why[0].toUpperCase()}${why.slice(1)}${why.endsWith(".") ? "" : "."}`;
    at("also").textContent = "";
    at("ways").replaceChildren(...(onApply ? ways.map(wayButton) : []));
    if (best !== null) {
      heading.replaceChildren("Use ", element("em", {}, labels[best]), `, micro-batch ${plan.candidates[best].micro_batch}`);
      return;
    }
    heading.textContent = "Nothing fits with these settings";
    const least = candidates().reduce((one, other) => (other.peak_bytes.device < one.peak_bytes.device ? other : one));
    at("also").textContent = `The smallest, ${least.strategy}, needs ${gib(least.peak_bytes.device)} per GPU; ${gib(least.capacity_bytes)} may be used.`
      + `${shown.is_quick ? " Looking for a change that fits …" : ""}`;
  }

  function wayButton({ text, setting }) {
    const button = element("button", { type: "button" }, `Use ${text}`);
    button.addEventListener("click", () => onApply(setting));
    return button;
  }

  function drawNumbers() {
    const one = chosen(), [rate, unit] = speed(one), batch = one.micro_batch * one.accumulate * shown.cluster.num_ranks;
    const tile = (name, value, more) => element("div", {}, element("dt", {}, name), element("dd", {}, value, " ", element("small", {}, more)));
    at("numbers").replaceChildren(
      tile(`Throughput of ${one.strategy}`, significant(rate), unit),
      tile("Step time", seconds(one.step_seconds), bandOfTime(one)),
      tile("Peak per GPU", gib(one.peak_bytes.device), `of ${gib(one.capacity_bytes)}`),
      ...(usesHost() ? [tile("Host memory per node", gib(hostBytes(one)), "")] : []),
      tile("Global batch", whole.format(batch), one.seq === null ? "samples" : `× ${whole.format(one.seq)} tokens`),
      tile("Model FLOPs utilisation", one.mfu === null ? "–" : share(one.mfu), ""),
      ...trainingTiles(tile),
    );
  }

  // Of a kind of device that was never measured, the range is all that is known.
  function bandOfTime({ step_seconds: step, step_seconds_range: [least, most] }) {
    const [below, above] = [1 - least / step, most / step - 1].map(share);
    return below === above ? `± ${above}` : `${seconds(least)} to ${seconds(most)}`;
  }

  // Days and cost of a training, whose rows are those of the plans that fit.
  function trainingTiles(tile) {
    const fitting = candidates().filter((one) => one.fits === "yes" || one.fits === "tight");
    const row = (shown.plan.training ?? [])[fitting.indexOf(chosen())];
    if (!row) return [];
    const { days, cost, gpu_hours: hours } = row;
    const length = days >= 1 ? [days, "days"] : days * 24 >= 1 ? [days * 24, "hours"] : [days * 1440, "minutes"];
    const money = cost === null ? [] : [tile("Cost", `$${whole.format(Math.max(1, Math.round(cost)))}`, `${significant(hours)} GPU-hours`)];
    return [tile("Training time", significant(length[0]), length[1]), ...money];
  }

  function drawMemory() {
    const rows = shown.rows.map((index) => {
      const one = candidates()[index], { allocated, reserved, device } = one.peak_bytes;
      const parts = [...Object.entries(one.breakdown_bytes), ["unused", reserved - allocated], ["context", device - reserved]];
      return { name: one.strategy, label: shown.labels[index].replace(" on ", " "), batch: one.micro_batch, fits: one.fits, device, parts, index };
    });
    charts.key(at("memory-key"), [...categories(chosen()).map((name) => [name]), ["unused", "reserved, unused"], ["context"]]);
    charts.memoryBars(at("memory-chart"), { rows, capacity: chosen().capacity_bytes, chosen: rows.find((row) => row.index === shown.chosen), onChoose });
  }

  function drawStep() {
    const one = chosen(), has = (queue) => shown.timeline.some((span) => span.queue === queue);
    at("step-title").textContent = `One step of ${shown.labels[shown.chosen]}`;
    charts.key(at("step-key"), [["forward"], ["backward"], ["update", "optimizer update"], ["copy", "copies and casts"],
      ...(has("gather") ? [["gather", usesHost() ? "gather parameters, load from host memory" : "gather parameters"]] : []),
      ...(has("reduce") ? [["reduce", "reduce gradients"]] : [])]);
    at("step-chart").classList.add("lanes");
    charts.lanes(at("step-chart"), { spans: shown.timeline, total: one.step_seconds });
    const waits = usesHost() ? "Waiting for communication and host memory" : "Exposed communication";
    at("step-note").textContent = `${waits}: ${seconds(one.exposed_comm_seconds)} (${share(one.exposed_comm_seconds / one.step_seconds)} of the step).`;
  }

  const recomputed = ({ plan, recompute }) => (Object.keys(plan.recompute_overrides).length ? "by unit" : recompute);
  function drawTable() {
    const hostHead = usesHost() ? ["host GiB per node"] : [], hostCells = (one) => (usesHost() ? [(hostBytes(one) / GIB).toFixed(1)] : []);
    charts.table(at("table"), ["strategy", "mesh", "recompute", "micro-batch", "peak GiB", ...hostHead, "fits", "step", speed(chosen())[1], "exposed comm.", "MFU"],
      candidates().map((one) => ({ chosen: one === chosen(), cells: [
        one.strategy, `${one.mesh.replicate}×${one.mesh.shard}`, recomputed(one), `${one.micro_batch}`, (one.peak_bytes.device / GIB).toFixed(1), ...hostCells(one), fitWords[one.fits],
        seconds(one.step_seconds), significant(speed(one)[0]), share(one.exposed_comm_seconds / one.step_seconds), one.mfu === null ? "–" : share(one.mfu),
      ] })));
  }

  function drawFrontier() {
    const { seq, cluster } = shown, unit = speed(chosen())[1];
    const points = shown.frontier.map(({ budget_bytes: budget, fixed }) => ({
      budget,
      value: fixed && (seq === null ? fixed.samples_per_s : (fixed.samples_per_s * seq) / cluster.num_ranks),
      label: fixed ? `${fixed.plan.strategy}, recompute ${fixed.plan.recompute}, micro-batch ${fixed.plan.micro_batch}` : "nothing fits",
    }));
    charts.frontier(at("frontier-chart"), { points, unit, now: points[points.length - 1] });
    charts.table(at("frontier-table"), ["budget", "plan", unit], points.map(({ budget, label, value }) => ({ cells: [gib(budget), label, value === null ? "–" : significant(value)] })));
  }

  window.addEventListener("resize", () => shown?.frontier && drawFrontier());
  return { draw };
};
