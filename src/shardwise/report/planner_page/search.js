// Settings → the cost of every strategy, the recommendation, and the frontier: planner/search. `quick`: without the
// allocator's model, as in the planner's frontier.
//
// Settings: {device, count, recompute, host, seq, batch (null: the most that fits), budget (bytes of a device; null: all)}.
"use strict";

const STRATEGIES = ["ddp", "zero1", "zero2", "shard_grad_op", "fsdp"], RECOMPUTES = ["none", "selective", "full"];
// What lives in host memory, as options of `shardwise plan`.
const HOSTS = { none: [], states: ["--offload states"], backward: ["--offload states", "--update backward"], all: ["--offload states,activations"] };
const MOST_BATCH = 2 ** 16, NUM_BUDGETS = 8, MOST_LEDGERS = 60;

// Whether host memory can be chosen: on one node, if the device's link to it is known.
function offersHost(hardware, { device, count }) {
  return count <= hardware.per_node && hardware.devices[device].host_link !== null;
}

// The largest batch that fits, if all below it do; at least 1.
function largestFitting(fits) {
  let low = 1, high = 2;
  while (high <= MOST_BATCH && fits(high)) [low, high] = [high, 2 * high];
  high = Math.min(high, MOST_BATCH + 1);
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (fits(middle)) low = middle; else high = middle;
  }
  return low;
}

// The largest number up to `most` that fits, to within a fiftieth, because each check runs the allocator's model.
function refined(most, fits) {
  if (fits(most)) return most;
  let low = 1, high = most;
  while (high - low > Math.max(1, Math.floor(low / 50))) {
    // The allocator usually adds about a tenth, so the answer is likely near the upper end.
    let middle = Math.min(high - 1, Math.max(low + 1, high - Math.max(1, Math.floor((high - low) / 8))));
    if (!fits(middle)) {
      high = middle;
      middle = Math.floor((low + high) / 2);
      if (middle === low || !fits(middle)) {
        high = Math.max(middle, low + 1);
        continue;
      }
    }
    low = middle;
  }
  return low;
}

class Planner {
  constructor(hardware, model) {
    Object.assign(this, { hardware, model });
    this.known = new Map();
    this.ledgers = new Map();
  }

  // A cache of what does not depend on most settings; it is cleared when it grows too large.
  once(key, make, { known = this.known, most = 20000 } = {}) {
    if (known.size > most) known.clear();
    let found = known.get(key);
    if (found === undefined) known.set(key, (found = make()));
    return found;
  }

  kernels(device) { return this.once(`kernels ${device}`, () => kernelModel.modelOf(this.hardware, device)); }

  cluster({ device, count }) {
    const { per_node: perNode } = this.hardware, { link, fabric } = this.hardware.devices[device];
    const nodes = Math.max(1, count / perNode);
    return { count, nodes, perNode: count / nodes, link, fabric: fabric && fabric.speed };
  }

  // All ranks on the shard axis and, over several nodes, shards of one node and of √nodes.
  meshes(strategy, { nodes, perNode, count }) {
    const whole = { replicate: 1, shard: count };
    if (!this.model.strategies.none[strategy].shards) return [whole];
    // Halves are rounded to the even number, as in Python.
    const half = Math.log2(nodes) / 2, root = 2 ** (half % 1 === 0.5 ? 2 * Math.round(half / 2) : Math.round(half));
    const shards = [...new Set([1, root])].sort((one, other) => other - one).filter((size) => size < nodes && nodes % size === 0);
    return [whole, ...shards.map((size) => ({ replicate: nodes / size, shard: perNode * size }))];
  }

  // A part (time, memory, allocations) of the step of a strategy on a mesh, and a key for it.
  step(part, strategy, { replicate, shard }, { host }) {
    const steps = this.model.strategies[host][strategy][replicate > 1 ? "crossed" : "flat"][part];
    const step = steps.find((one) => one.slices.includes(shard));
    return { step: memoryModel.numbered(step, step.slices.indexOf(shard)), key: `${strategy} ${replicate > 1} ${shard} ${host}` };
  }

  streams(seq) {
    return (stored) => this.once(`stream ${stored} ${seq}`, () =>
      memoryModel.streamPeak(this.model.storages[stored], this.model.laws, seq, this.hardware.block_bytes));
  }

  memory(strategy, mesh, settings, batch) {
    const { recompute: way, seq, device, host } = settings, { step, key } = this.step("memory", strategy, mesh, settings);
    const of = { step, way, seq, streams: this.streams(seq), keepsActivations: host === "all" };
    const peaks = this.once(`peaks ${key} ${way} ${seq}`, () => memoryModel.replay(this.model, of));
    const [states, saved] = this.once(`host ${key} ${way} ${seq}`, () => memoryModel.hostLine(this.model, of));
    const found = memoryModel.highest(peaks, batch), { outside, communicator } = this.hardware.devices[device];
    const more = outside + step.communicators * communicator;
    return { allocated: found.bytes, reserved: found.bytes, device: found.bytes + more, host: states + saved * batch, found, slack: 0 };
  }

  // The same with what the allocator reserves, unless the tensors alone do not fit. With `abandons`, null as soon as it
  // does not fit, which takes less time.
  reservedMemory(strategy, mesh, settings, batch, { abandons = false } = {}) {
    const quick = this.memory(strategy, mesh, settings, batch);
    if (this.fits(quick.device, settings) === "no") return quick;
    const { recompute: way, seq } = settings, { step, key } = this.step("allocations", strategy, mesh, settings), outside = quick.device - quick.allocated;
    const limit = allocatorModel.rounded(this.capacity(settings) / (1 + this.hardware.memory_band)) - outside;
    const ledgerOf = (index, make) => this.once(`${key} ${way} ${index}`, make, { known: this.ledgers, most: MOST_LEDGERS });
    const reserve = () => allocatorModel.reserve(this.model, { step, way, seq, batch, limit, workspace: this.hardware.workspace_bytes, ledgerOf, abandons });
    const of = `reserved ${key} ${way} ${seq} ${batch} ${limit}`;
    const found = abandons ? this.once(`${of} within`, reserve) : this.known.get(`${of} within`) ?? this.once(of, reserve);
    if (found === null) return null;
    const allocated = quick.allocated + found.slack, held = Math.max(found.reserved, allocated);
    return { ...quick, allocated, reserved: held, device: held + outside, slack: found.slack };
  }

  capacity({ device, budget }) {
    const { capacity } = this.hardware.devices[device];
    return budget === null ? capacity : Math.min(capacity, budget);
  }

  fits(bytes, settings) {
    const capacity = this.capacity(settings);
    if (bytes * (1 + this.hardware.memory_band) <= capacity) return "yes";
    return bytes <= capacity ? "tight" : "no";
  }

  schedule(strategy, mesh, settings) {
    const { step, key } = this.step("time", strategy, mesh, settings), cluster = this.cluster(settings), kernels = this.kernels(settings.device);
    const of = `schedule ${key} ${settings.device} ${settings.count}`;
    const schedule = this.once(of, () => stepTime.scheduleOf(step, { mesh, cluster, kernels, hardware: this.hardware }));
    return { schedule, cluster, length: step.length };
  }

  // With host memory: the CPU's lead over a device that waits, how long what units save is on its way, and whether a step
  // leaves copies to the next one.
  hostTiming(schedule, pieces, computed, { host, recompute: way, seq }, batch) {
    if (host === "none") return {};
    const numOps = computed.pieces.reduce((total, [list]) => total + this.model.computes[list].length, 0);
    const launch = pieces.reduce((total, [one]) => total + one, 0), { most_issued: most, steps_until_steady: numBefore } = this.hardware;
    const lines = this.once(`saved ${way} ${seq}`, () => memoryModel.savedLines(this.model, { way, streams: this.streams(seq) }));
    const saved = new Map([...lines].map(([unit, [fixed, each]]) => [unit, (fixed + each * batch) / schedule.savedBytesPerSecond]));
    return { lead: (most * launch) / numOps, numBefore, saved, leavesCopies: host === "backward" };
  }

  time(strategy, mesh, settings, batch, { records = false } = {}) {
    const { seq, recompute: way, device } = settings;
    const { schedule, cluster, length } = this.schedule(strategy, mesh, settings), computed = this.model.ways[way][length];
    const ops = this.once(`ops ${seq} ${batch} ${device}`, () => kernelModel.operations(this.model, { kernels: this.kernels(device), seq, batch }));
    const pieces = this.once(`pieces ${way} ${length} ${seq} ${batch} ${device}`, () =>
      kernelModel.pieceSeconds(this.model, computed, { kernels: this.kernels(device), ops }));
    const found = stepTime.steady(schedule, pieces, { slowdown: this.hardware.slowdown, records, ...this.hostTiming(schedule, pieces, computed, settings, batch) });
    const inGroup = strategy === "fsdp" || strategy === "shard_grad_op" ? schedule.shardNodes : 1;
    const seconds = found.seconds + this.stragglerSeconds(found.seconds, inGroup, cluster.nodes);
    const flops = this.once(`flops ${way} ${length} ${seq}`, () => kernelModel.forwardFlops(this.model, computed, seq));
    const peak = this.hardware.devices[device].mfu_peak;
    return {
      ...found,
      seconds,
      samplesPerSecond: (batch * settings.count) / seconds,
      tokensPerSecondPerDevice: seq === null ? null : (batch * seq) / seconds,
      mfu: peak ? (3 * (flops[0] + flops[1] * batch)) / (seconds * peak) : null,
      band: this.timeBand(found.cpuSeconds / seconds, settings, cluster),
    };
  }

  // The wait for the slowest node and for pauses (planner/time/straggler.py).
  stragglerSeconds(seconds, inGroup, nodes) {
    const { spread, paused_share: share, pause_seconds: length } = this.hardware;
    const pauses = this.mostPauses(Math.floor(nodes / inGroup), (inGroup * share * seconds) / length);
    return spread * seconds * (nodes / (nodes + 1) - 0.5) + length * pauses - share * seconds;
  }

  mostPauses(count, mean) {
    if (count === 1) return mean;
    if (mean > this.hardware.many_pauses) return mean + Math.sqrt(mean) * this.hardware.expected_maximum[count];
    let total = 0, number = 0, probability = Math.exp(-mean), below = probability;
    for (;;) {
      const more = 1 - below ** count;
      total += more;
      if (number > mean && more < 1e-12) return total;
      number += 1;
      probability *= mean / number;
      below = Math.min(below + probability, 1);
    }
  }

  timeBand(cpuShare, { device, host }, { nodes }) {
    const { kernels_band: kernels, host_band: cpu } = this.hardware.devices[device];
    const { nodes_band: between, host_bound: bound, offloaded_band: offloaded } = this.hardware;
    return Math.hypot(kernels, nodes > 1 ? between : 0, cpuShare > bound ? cpu : 0, host === "none" ? 0 : offloaded);
  }

  // Days and dollars of a training at the speed of a plan (planner/search/training_cost.py).
  trainingCost(one, { seq, count }, { tokens, price }) {
    const days = tokens / (one.time.samplesPerSecond * seq * 86400), gpuHours = days * 24 * count;
    return { days, gpuHours, cost: price === null ? null : gpuHours * price };
  }

  // The micro-batch that was asked for, or the largest that fits.
  batchOf(strategy, mesh, settings, { quick }) {
    if (settings.batch !== null) return settings.batch;
    const most = largestFitting((one) => this.fits(this.memory(strategy, mesh, settings, one).device, settings) === "yes");
    const reserved = (one) => this.reservedMemory(strategy, mesh, settings, one, { abandons: true });
    return most === 1 || quick ? most : refined(most, (one) => this.fits(reserved(one)?.device ?? Infinity, settings) === "yes");
  }

  // `time` is computed when it is first read.
  cost(strategy, mesh, settings, { quick = false } = {}) {
    const batch = this.batchOf(strategy, mesh, settings, { quick });
    const memory = quick ? this.memory(strategy, mesh, settings, batch) : this.reservedMemory(strategy, mesh, settings, batch);
    const breakdown = memoryModel.breakdown(memory.found, this.model.categories, batch);
    breakdown[breakdown.length - 1] += memory.slack;
    const key = `time ${strategy} ${mesh.shard} ${settings.count} ${settings.device} ${settings.recompute} ${settings.host} ${settings.seq} ${batch}`;
    const time = () => this.once(key, () => this.time(strategy, mesh, settings, batch));
    return {
      strategy, mesh, batch, fits: this.fits(memory.device, settings), allocated: memory.allocated, reserved: memory.reserved, device: memory.device, host: memory.host,
      breakdown, at: memory.found.peak.label,
      get time() { return time(); },
    };
  }

  // Only those that shard gradients can keep states in host memory.
  strategies({ host }) { return STRATEGIES.filter((name) => name in this.model.strategies[host]); }

  candidates(settings, { quick = false } = {}) {
    const cluster = this.cluster(settings);
    return this.strategies(settings).flatMap((strategy) => this.meshes(strategy, cluster).map((mesh) => this.cost(strategy, mesh, settings, { quick })));
  }

  // The rule of recommend.py (best_of): the simplest of those as fast as the fastest; on one device, the simplest.
  best(found) {
    for (const verdict of ["yes", "tight"]) {
      const fitting = found.filter((one) => one.fits === verdict);
      if (!fitting.length) continue;
      const speed = (one) => one.time.samplesPerSecond, most = Math.max(...fitting.map(speed));
      const asFast = fitting.filter((one) => one.mesh.replicate * one.mesh.shard === 1 || Math.round(100 * (1 - speed(one) / most)) <= 100 * this.hardware.pair_band);
      const simplest = Math.min(...asFast.map((one) => STRATEGIES.indexOf(one.strategy)));
      const [best] = asFast.filter((one) => one.strategy === STRATEGIES[simplest]).sort((one, other) => speed(other) - speed(one));
      const [first] = fitting.filter((one) => speed(one) === most);
      return { best, first, fitting };
    }
    return null;
  }

  // The budgets of the frontier, up to the capacity that may be used.
  budgets(settings) {
    const capacity = this.capacity(settings);
    return Array.from({ length: NUM_BUDGETS }, (_, index) => Math.floor((capacity * (index + 1)) / NUM_BUDGETS));
  }

  // The fastest plan with one strategy and one recompute for all units that fits a budget; null if none does.
  fastest(settings, budget) {
    let best = null;
    for (const recompute of RECOMPUTES) {
      for (const one of this.candidates({ ...settings, recompute, budget }, { quick: true })) {
        if (one.fits === "yes" && (best === null || one.time.samplesPerSecond > best.time.samplesPerSecond)) best = Object.assign(one, { recompute });
      }
    }
    return best;
  }

  // The smallest change of the settings that fits, as ways_out finds it: recompute, a smaller micro-batch; or else, as far
  // as they fit, host memory and more devices. Gradients in 16 bits are not on the page.
  waysOut(settings) {
    const start = RECOMPUTES.indexOf(settings.recompute);
    const smaller = settings.batch > 1 ? { batch: null } : {};
    const changes = [
      ...RECOMPUTES.slice(start + 1).map((recompute) => ({ recompute })),
      ...(settings.batch > 1 ? [smaller, { ...smaller, recompute: "full" }] : []),
    ];
    const kept = this.smallestFitting(settings, changes);
    if (kept) return [kept];
    const hosts = offersHost(this.hardware, settings) ? Object.keys(HOSTS).slice(Object.keys(HOSTS).indexOf(settings.host) + 1) : [];
    const inHost = hosts.flatMap((host) => [{ host, ...smaller }, { host, recompute: "full", ...smaller }]);
    return [this.smallestFitting(settings, inHost), this.moreDevices(settings)].filter((way) => way !== null);
  }

  // The first of these changes that fits; null if none does.
  smallestFitting(settings, changes) {
    for (const change of changes) {
      const changed = { ...settings, ...change };
      // First with the tensors alone, which is fast.
      if (!this.candidates(changed, { quick: true }).some((one) => one.fits === "yes")) continue;
      const found = this.best(this.candidates(changed));
      if (found && found.best.fits === "yes") return { change, best: found.best, isOffered: true };
    }
    return null;
  }

  // The fewest devices that fit: 2, 4, 8, then machines of 8. Without known links between machines there is no time, and
  // the page does not offer them.
  moreDevices(settings) {
    const { per_node: perNode, counts, devices } = this.hardware, [last] = STRATEGIES.slice(-1);
    for (const count of counts.filter((one) => one > settings.count && Number.isInteger(Math.log2(one)))) {
      for (const recompute of new Set([settings.recompute, "full"])) {
        const host = count <= perNode ? settings.host : "none", batch = settings.batch === null ? null : 1;
        const found = this.cost(last, { replicate: 1, shard: count }, { ...settings, count, recompute, host, batch: 1 });
        if (found.fits === "yes") return { change: { count, recompute, host, batch }, best: found, isOffered: count <= perNode || devices[settings.device].fabric !== null };
      }
    }
    return null;
  }

  // One step of a candidate: [what, name, start, end], starting at 0.
  timeline(candidate, settings) {
    const { spans } = this.time(candidate.strategy, candidate.mesh, settings, candidate.batch, { records: true });
    const start = Math.min(...spans.map((span) => span[2]));
    return spans.map(([what, name, from, to]) => [what, this.model.names[name], from - start, to - start]);
  }

  // The file that `shardwise plan --save` writes.
  toml(candidate, settings, template) {
    const values = { strategy: `"${candidate.strategy}"`, recompute: `"${settings.recompute}"`, micro_batch: candidate.batch,
      offload_states: settings.host !== "none", offload_activations: settings.host === "all", update: settings.host === "backward" ? `"backward"` : `"step"`, replicate: candidate.mesh.replicate, shard: candidate.mesh.shard };
    return Object.entries(values).reduce((text, [key, value]) => text.replace(new RegExp(`^${key} = .*$`, "m"), `${key} = ${value}`), template);
  }
}
