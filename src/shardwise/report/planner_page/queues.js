// Instructions → the time of a step: planner/time/collective.py, queues.py and step_time.py.
"use strict";

const stepTime = (() => {
  const PIECE = 0, COPY = 1, UPDATE = 2, CALLED = 3, SENT = 4, WAITED = 5, MARKED = 6, STREAMED = 7, LOADED = 8;
  const BOTH_WAYS = 1, SAVED = 2;
  const FAR_AHEAD = 1e6, ROUNDING = 1e-6;
  const SHARD = 0, REPLICATE = 1, WORLD = 2, GATHER = 0;

  // Ranks that communicate together: [ranks, nodes, bytes per second, seconds of a hop, of a hop between nodes].
  function ringOf(ranks, onNode, cluster) {
    const nodes = Math.ceil(ranks / onNode), speeds = [];
    let hop = 0, nodeHop = 0;
    if (onNode > 1) { speeds.push(cluster.link[0]); hop = cluster.link[1]; }
    if (nodes > 1) { speeds.push(cluster.fabric[0] / (cluster.perNode / onNode)); nodeHop = cluster.fabric[1]; }
    return { ranks, nodes, bytesPerSecond: Math.min(Infinity, ...speeds), hop, nodeHop };
  }

  function ringsOf({ replicate, shard }, cluster) {
    const { perNode } = cluster;
    const rings = [];
    rings[SHARD] = ringOf(shard, Math.min(shard, perNode), cluster);
    rings[REPLICATE] = ringOf(replicate, Math.max(1, Math.min(replicate, Math.floor(perNode / shard))), cluster);
    rings[WORLD] = ringOf(replicate * shard, perNode, cluster);
    return rings;
  }

  function ringSeconds(ring, bytes, rounds, protocols) {
    if (ring.ranks === 1) return 0;
    const between = ring.nodes - 1;
    const hops = rounds * ((ring.ranks - 1 - between) * ring.hop + between * ring.nodeHop);
    const sent = (rounds * bytes * (ring.ranks - 1)) / ring.ranks;
    return Math.min(...protocols.map(([base, hop, bandwidth]) => base + hop * hops + sent / (bandwidth * ring.bytesPerSecond)));
  }

  function treeSeconds(ring, bytes, { protocols, tree_bandwidth: tree }) {
    const onNode = Math.floor(ring.ranks / ring.nodes);
    const hops = 2 * ((onNode - 1) * ring.hop + Math.ceil(Math.log2(ring.nodes)) * ring.nodeHop);
    return Math.min(...protocols.map(([base, hop, bandwidth]) => base + hop * hops + (2 * bytes) / (tree * bandwidth * ring.bytesPerSecond)));
  }

  function collectiveSeconds(ring, kind, bytes, hardware) {
    if (kind === GATHER) return ringSeconds(ring, bytes, 1, hardware.protocols);
    const around = ringSeconds(ring, bytes, 2, hardware.protocols);
    return ring.nodes > 1 ? Math.min(around, treeSeconds(ring, bytes, hardware)) : around;
  }

  // Bytes per second to or from host memory, which the devices of a node share; in both directions at once, each.
  function hostSpeed({ host_link: link }, { perNode }, hardware, isBoth) {
    return Math.min(link[isBoth ? 1 : 0], hardware.node_host_bytes_per_s / perNode / (isBoth ? 2 : 1));
  }

  // The step of one strategy on a cluster, for any batch: instructions with seconds; with bytes where they depend on it.
  function scheduleOf(step, { mesh, cluster, kernels, hardware }) {
    const rings = ringsOf(mesh, cluster), { device } = kernels, factor = device.host_factor, { number } = step;
    const hostCopy = (kind, amount) => (kind === SAVED ? { unit: amount } : { seconds: number(amount) / hostSpeed(device, cluster, hardware, kind === BOTH_WAYS) });
    const list = step.instructions.map(([what, name, ...rest]) => {
      switch (what) {
        case PIECE: return { what, name, piece: rest[0] };
        case COPY: {
          const launch = factor * number(rest[0]), bytes = number(rest[1]), kernel = bytes ? rest[2] * kernels.copySeconds(bytes) : 0;
          return { what, name, work: [launch, kernel, launch + kernel] };
        }
        case UPDATE: {
          const [issue, kernel] = kernels.updateSeconds(number(rest[1]), number(rest[2]));
          const launch = issue + factor * number(rest[0]);
          return { what, name, work: [launch, kernel, launch + kernel] };
        }
        case SENT: {
          const ring = rings[rest[1]], seconds = rest[4] * collectiveSeconds(ring, rest[2], number(rest[3]), hardware);
          return { what, name, launch: factor * number(rest[0]), isBetween: ring.nodes > 1, seconds };
        }
        case STREAMED: return { what, name, launch: factor * number(rest[0]), ...hostCopy(rest[1], rest[2]) };
        case LOADED: return { what, name, launch: factor * number(rest[0]), ...hostCopy(rest[1], rest[2]), after: rest[3] };
        case MARKED: return { what, name, standsFor: rest[0] ? rest[1] : 0 };
        default: return { what, name, launch: factor * number(rest[0]) };
      }
    });
    return { list, numUpdate: step.num_update, shardNodes: rings[SHARD].nodes, savedBytesPerSecond: device.host_link && hostSpeed(device, cluster, hardware, false) };
  }

  // The queues and their waits. `spans`, if they are recorded, are [lane, name, start, end]. `lead`: seconds by which the CPU
  // can be ahead of a device that waits. `saved`: seconds to copy what a unit has saved, by its number.
  class Queues {
    constructor({ slowdown, cpu, lead, saved }) {
      Object.assign(this, { slowdown, cpu, lead, saved, compute: 0, wire: 0, fabric: 0, host: 0, loads: 0, exposed: 0, sent: 0, slowed: 0, ends: new Map(), streamed: new Set(), spans: null });
      this.marked = this.now();
      this.markedSpans = 0;
    }

    now() { return [this.cpu, this.compute, this.wire, this.fabric, this.exposed, this.sent, this.slowed, this.host, this.loads]; }

    set(times) { [this.cpu, this.compute, this.wire, this.fabric, this.exposed, this.sent, this.slowed, this.host, this.loads] = times; }

    run(instructions, pieces) {
      for (const one of instructions) {
        if (one.what === PIECE || one.what === COPY || one.what === UPDATE) this.work(one, one.what === PIECE ? pieces[one.piece] : one.work);
        else if (one.what === SENT) this.send(one);
        else if (one.what === WAITED) this.wait(one);
        else if (one.what === CALLED) this.cpu += one.launch;
        else if (one.what === STREAMED) this.stream(one);
        else if (one.what === LOADED) this.load(one);
        else this.mark(one.standsFor);
      }
    }

    work({ what, name }, [launch, kernel, span]) {
      const start = Math.max(this.compute, this.cpu);
      let end = Math.max(this.compute + kernel, this.cpu + span);
      const busy = Math.max(this.wire, this.fabric);
      if (busy > start) {
        const more = this.slowdown * Math.min(busy - start, kernel);
        end += more;
        this.slowed += more;
      }
      if (this.spans && kernel) this.spans.push([what, name, Math.max(start, end - kernel * (1 + this.slowdown)), end]);
      this.compute = end;
      this.cpu += launch;
    }

    send({ name, launch, isBetween, seconds }) {
      this.cpu += launch;
      // What it sends may still be on its way from host memory.
      const start = Math.max(this.compute, this.cpu, isBetween ? this.fabric : this.wire, this.ends.get(name) ?? -Infinity), end = start + seconds;
      this.ends.set(name, end);
      if (isBetween) this.fabric = end; else this.wire = end;
      this.sent += seconds;
      if (this.spans && seconds) this.spans.push([SENT, name, start, end]);
    }

    wait({ name, launch }) {
      this.cpu += launch;
      const end = this.take(name);
      this.cpu = Math.max(this.cpu, end - this.lead);
      if (end > this.compute) {
        if (end > this.cpu) this.exposed += end - Math.max(this.compute, this.cpu);
        this.compute = end;
      }
    }

    // The end of what has that name, once.
    take(name) {
      const end = this.ends.get(name) ?? 0;
      this.ends.delete(name);
      return end;
    }

    stream({ name, launch, seconds, unit }) {
      this.cpu += launch;
      const start = Math.max(this.host, this.compute, this.cpu), length = seconds ?? this.saved.get(unit);
      this.host = start + length;
      this.ends.set(name, this.host);
      this.streamed.add(name);
      if (this.spans && length) this.spans.push([STREAMED, name, start, this.host]);
    }

    load({ name, launch, seconds, unit, after }) {
      this.cpu += launch;
      const start = Math.max(this.loads, this.compute, this.cpu, this.take(after));
      let length = seconds ?? this.saved.get(unit);
      if (this.host > start) {
        // Both are half as fast meanwhile, and what was streamed ends later.
        for (const other of this.streamed) if ((this.ends.get(other) ?? start) > start) this.ends.set(other, this.ends.get(other) + length);
        this.host += length;
        length *= 2;
      }
      this.loads = start + length;
      this.ends.set(name, this.loads);
      if (this.spans && length) this.spans.push([LOADED, name, start, this.loads]);
    }

    mark(standsFor) {
      if (standsFor) this.skip(standsFor - 1);
      this.marked = this.now();
      if (this.spans) this.markedSpans = this.spans.length;
    }

    // Repeats what happened since the last mark: equal units advance every queue by the same seconds.
    skip(times) {
      const now = this.now(), rates = now.map((one, index) => one - this.marked[index]);
      const compute = rates[1], ahead = Math.max(rates[2], rates[3]), slowed = rates[6];
      let slowTimes = times;
      if (compute - ahead > ROUNDING * compute) {
        const left = Math.max(this.wire, this.fabric) - this.compute;
        slowTimes = Math.min(times, Math.max(0, left / (compute - ahead)));
      }
      const after = now.map((one, index) => one + times * rates[index]);
      after[1] -= (times - slowTimes) * slowed;
      after[6] -= (times - slowTimes) * slowed;
      if (this.spans) {
        const each = (after[1] - now[1]) / Math.max(times, 1);
        for (const span of this.spans.slice(this.markedSpans)) {
          for (let index = 1; index <= times; index++) this.spans.push([span[0], span[1], span[2] + index * each, span[3] + index * each]);
        }
      }
      this.set(after);
      for (const [name, end] of this.ends) this.ends.set(name, end + times * ahead);
    }

    // Resets the clock to the end of the computation; collectives in flight continue.
    restart(cpu) {
      const end = this.compute;
      for (const [name, arrival] of this.ends) this.ends.set(name, arrival - end);
      for (const name of this.streamed) if (!this.ends.has(name)) this.streamed.delete(name);
      this.set([cpu, 0, this.wire - end, this.fabric - end, 0, 0, 0, this.host - end, this.loads - end]);
    }
  }

  // `numBefore`: the steps before it that count.
  function once(schedule, pieces, { slowdown, cpu, lead = Infinity, saved, numBefore = 0, records }) {
    const queues = new Queues({ slowdown, cpu, lead, saved });
    if (schedule.numUpdate) {
      queues.run(schedule.list.slice(-schedule.numUpdate), pieces);
      queues.restart(cpu);
    }
    for (let step = 0; step < numBefore; step++) {
      queues.run(schedule.list, pieces);
      queues.restart(lead < Infinity ? queues.cpu - queues.compute : cpu);
    }
    if (records) queues.spans = [];
    queues.run(schedule.list, pieces);
    return queues;
  }

  // A step in the middle of training takes as long as the slower of the two: the device with a CPU far ahead, or the CPU.
  // With host memory the CPU's `lead` over a device that waits for it is limited (planner/time/step_time.py).
  function steady(schedule, pieces, { slowdown, lead = Infinity, numBefore, saved, leavesCopies = false, records = false }) {
    const usual = { slowdown, saved, numBefore: leavesCopies ? 1 : 0, records };
    let queues = once(schedule, pieces, { ...usual, cpu: -FAR_AHEAD });
    const deviceSeconds = queues.compute, cpuSeconds = queues.cpu + FAR_AHEAD;
    let seconds = Math.max(deviceSeconds, cpuSeconds);
    if (lead < cpuSeconds) {
      queues = once(schedule, pieces, { ...usual, cpu: 0, lead, numBefore });
      seconds = queues.compute;
    } else if (cpuSeconds > deviceSeconds) queues = once(schedule, pieces, { ...usual, cpu: 0 });
    return { seconds, cpuSeconds, exposed: queues.exposed, sent: queues.sent, spans: queues.spans };
  }

  return { scheduleOf, steady, PIECE, UPDATE, SENT, STREAMED, LOADED };
})();
