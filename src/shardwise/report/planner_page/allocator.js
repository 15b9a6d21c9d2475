// What PyTorch's caching allocator reserves for a step: planner/memory/allocations.py, allocator.py and reserved.py.
"use strict";

const allocatorModel = (() => {
  const MIB = 2 ** 20, ROUND = 512, SMALL = MIB, LARGE_SEGMENT = 20 * MIB, LEAST_OWN = 10 * MIB, SEGMENT_ROUND = 2 * MIB;
  const { ACTIVATION_DIED, COPY_DIED, GRADIENT_BORN, SCRATCH, COLUMN_SUM, CHANGE, MOVE } = memoryModel.codes;
  const roundUp = (bytes, to) => Math.ceil(bytes / to) * to;

  // Python's round: a half goes to the even number.
  function rounded(number) {
    const whole = Math.round(number);
    return Math.abs(number % 1) === 0.5 && whole % 2 !== 0 ? whole - 1 : whole;
  }

  // A step as single allocations and releases, in order. `slots`: of each entry; `sizes`: −1 for a release, else the
  // index of its size in `kinds`: {bytes}, {law} or {law, columns}.
  class Ledger {
    constructor(model, cut, { step, column, way }, cutStep) {
      Object.assign(this, { slots: [], sizes: [], kinds: [], updateAt: 0, numSlots: 0 });
      this.known = new Map();
      this.buffers = new Map();
      this.storages = new Map();
      this.byLaw = new Map();
      this.grads = new Map();
      const number = (place) => { const value = step.columns[place]; return Array.isArray(value) ? value[column] : value; };
      cut.rows.forEach((unit, row) => {
        if (row === cut.update) this.updateAt = this.slots.length;
        for (const change of cutStep.changes[row]) this.change(change, number);
        const stored = cut.ways[way][row];
        if (stored !== undefined) this.stream(unit, model.storages[stored]);
      });
      // Gradients go when the next step begins.
      for (const [key, held] of this.buffers) if (key.startsWith(`${model.categories.indexOf("grads")} `)) held.forEach((slot) => this.release(slot));
    }

    kind(key, value) {
      if (!this.known.has(key)) { this.known.set(key, this.kinds.length); this.kinds.push(value); }
      return this.known.get(key);
    }

    allocate(kind) {
      this.slots.push(++this.numSlots);
      this.sizes.push(kind);
      return this.numSlots;
    }

    release(slot) { this.slots.push(slot); this.sizes.push(-1); }

    held(key) {
      if (!this.buffers.has(key)) this.buffers.set(key, []);
      return this.buffers.get(key);
    }

    change(change, number) {
      if (change[0] === CHANGE) {
        const bytes = number(change[2]);
        if (bytes > 0) this.held(`${change[1]} ${bytes}`).push(this.allocate(this.kind(`b${bytes}`, { bytes })));
        else { const slot = this.held(`${change[1]} ${-bytes}`).shift(); if (slot !== undefined) this.release(slot); }
      } else if (change[0] === MOVE) {
        const bytes = number(change[3]), slot = this.held(`${change[1]} ${bytes}`).shift();
        if (slot !== undefined) this.held(`${change[2]} ${bytes}`).push(slot);
      } else {
        for (const slot of (this.grads.get(change[1]) ?? new Map()).values()) this.release(slot);
        this.grads.delete(change[1]);
      }
    }

    stream(unit, events) {
      for (let index = 0; index < events.length; index += 4) {
        const code = events[index], law = events[index + 1], extra = events[index + 2], ordinal = events[index + 3];
        const key = 65536 * unit + ordinal;
        if (code === ACTIVATION_DIED || code === COPY_DIED) this.died(unit, ordinal < 0 ? this.ofAnother(unit, law) : key, law);
        else if (code === SCRATCH || code === COLUMN_SUM) {
          const columns = code === COLUMN_SUM ? extra : 0;
          this.release(this.allocate(this.kind(`l${law} ${columns}`, { law, columns })));
        } else {
          const slot = this.allocate(this.kind(`l${law} 0`, { law, columns: 0 }));
          if (code === GRADIENT_BORN) {
            const owner = extra < 0 ? unit : extra;
            if (!this.grads.has(owner)) this.grads.set(owner, new Map());
            this.grads.get(owner).set(key, slot);
          } else {
            this.storages.set(key, slot);
            if (!this.byLaw.has(law)) this.byLaw.set(law, []);
            this.byLaw.get(law).push(key);
          }
        }
      }
    }

    // The last of that size, since backward goes back the way that forward came.
    ofAnother(unit, law) {
      const keys = this.byLaw.get(law) ?? [];
      for (let index = keys.length - 1; index >= 0; index--) if (Math.floor(keys[index] / 65536) !== unit) return keys[index];
      return undefined;
    }

    died(unit, key, law) {
      const slot = key === undefined ? undefined : this.storages.get(key);
      if (slot === undefined) return;
      this.storages.delete(key);
      const keys = this.byLaw.get(law);
      keys.splice(keys.lastIndexOf(key), 1);
      this.release(slot);
    }
  }

  // Blocks above 1 MiB, of one stream. The smallest free block that is large enough is taken, and split if enough is left.
  class CachingAllocator {
    constructor(limit) { Object.assign(this, { limit, reserved: 0, most: 0, allocated: 0, free: [], count: 0 }); }

    // Where (size, number) stands, or would stand, among the free blocks.
    place(size, number) {
      let low = 0, high = this.free.length;
      while (low < high) {
        const middle = (low + high) >> 1, one = this.free[middle];
        if (one.size < size || (one.size === size && one.number < number)) low = middle + 1; else high = middle;
      }
      return low;
    }

    insert(block) { block.isFree = true; this.free.splice(this.place(block.size, block.number), 0, block); }

    allocate(bytes) {
      const size = roundUp(bytes, ROUND), place = this.place(size, 0);
      const block = place < this.free.length ? this.free.splice(place, 1)[0] : this.segment(size < LEAST_OWN ? LARGE_SEGMENT : roundUp(size, SEGMENT_ROUND));
      if (block.size - size > SMALL) {
        const rest = { size: block.size - size, number: ++this.count, before: block, after: block.after, isFree: true };
        if (block.after) block.after.before = rest;
        block.after = rest;
        block.size = size;
        this.insert(rest);
      }
      block.isFree = false;
      this.allocated += block.size;
      return block;
    }

    // A new one; beyond the limit too, if giving back what is free is not enough.
    segment(size) {
      if (this.limit !== null && this.reserved + size > this.limit) {
        this.free = this.free.filter((block) => { const kept = block.before || block.after; if (!kept) this.reserved -= block.size; return kept; });
      }
      this.reserved += size;
      this.most = Math.max(this.most, this.reserved);
      return { size, number: ++this.count, before: null, after: null, isFree: false };
    }

    release(block) {
      this.allocated -= block.size;
      const { before, after } = block;
      if (before && before.isFree) {
        this.free.splice(this.place(before.size, before.number), 1);
        block.size += before.size;
        block.before = before.before;
        if (block.before) block.before.after = block;
      }
      if (after && after.isFree) {
        this.free.splice(this.place(after.size, after.number), 1);
        block.size += after.size;
        block.after = after.after;
        if (block.after) block.after.before = block;
      }
      this.insert(block);
    }
  }

  // The allocator at work. What is small is only counted: it shares segments.
  class Run {
    constructor(limit) { Object.assign(this, { allocator: new CachingAllocator(limit), small: 0, mostSmall: 0, peak: 0, slack: 0, slackAtPeak: 0 }); }

    allocate(bytes) {
      if (bytes <= SMALL) {
        this.small += bytes;
        this.mostSmall = Math.max(this.mostSmall, this.small);
        return null;
      }
      const block = this.allocator.allocate(bytes);
      this.slack += block.size - bytes;
      if (this.allocator.allocated > this.peak) {
        this.peak = this.allocator.allocated;
        this.slackAtPeak = this.slack;
      }
      return block;
    }

    free(block, bytes) {
      if (block === null) { this.small -= bytes; return; }
      this.slack -= block.size - bytes;
      this.allocator.release(block);
    }

    // Entries of a step from `from` to `to`. `held`: by slot its block (null: a small one; undefined: none), and its bytes.
    go(ledger, sizes, from, to, held) {
      for (let index = from; index < to; index++) {
        const slot = ledger.slots[index], kind = ledger.sizes[index];
        if (kind >= 0) {
          held.blocks[slot] = this.allocate(sizes[kind]);
          held.bytes[slot] = sizes[kind];
        } else if (held.blocks[slot] !== undefined) {
          this.free(held.blocks[slot], held.bytes[slot]);
          held.blocks[slot] = undefined;
        }
      }
      return held;
    }

    // Nothing of a step lasts. Slots are in the order in which they were allocated.
    end(held) { held.blocks.forEach((block, slot) => { if (block !== undefined) this.free(block, held.bytes[slot]); }); }
  }

  // Three steps: the optimizer's state comes into being in the first, in memory that the first backward has left.
  function run(ledger, { first, moments, sizes, workspace, limit }) {
    const one = new Run(limit), length = ledger.slots.length;
    const nothing = () => ({ blocks: new Array(ledger.numSlots + 1).fill(undefined), bytes: new Float64Array(ledger.numSlots + 1) });
    for (const bytes of first) one.allocate(bytes);
    for (const bytes of [workspace / 2, workspace / 2]) one.allocate(bytes);
    const held = one.go(ledger, sizes, 0, ledger.updateAt, nothing());
    for (const bytes of moments) one.allocate(bytes);
    one.end(one.go(ledger, sizes, ledger.updateAt, length, held));
    one.end(one.go(ledger, sizes, 0, length, nothing()));
    one.peak = 0;
    one.end(one.go(ledger, sizes, 0, length, nothing()));
    return { reserved: one.allocator.most + roundUp(one.mostSmall, 2 * MIB), slack: one.slackAtPeak };
  }

  // What a plan reserves at one batch, on a device that has no more than `limit` for tensors.
  function reserve(model, { step, column, way, seq, batch, limit, workspace, ledgerOf }) {
    const number = (place) => { const value = step.columns[place]; return Array.isArray(value) ? value[column] : value; };
    const unfold = (groups) => groups.flatMap(([count, places]) => { const list = places.map(number); return Array.from({ length: count }, () => list).flat(); });
    const batchLine = memoryModel.lineOf(model.batch_bytes, seq), batchBytes = batchLine[0] + batchLine[1] * batch;
    const runs = model.cuts.map((cut, index) => {
      const cutStep = step.cuts[index], ledger = ledgerOf(index, () => new Ledger(model, cut, { step, column, way }, cutStep));
      const sizes = ledger.kinds.map(({ bytes, law, columns }) => {
        if (law === undefined) return bytes;
        const line = memoryModel.lineOf(model.laws[law], seq), size = line[0] + line[1] * batch;
        return columns ? memoryModel.columnSumBytes(size, columns) : size;
      });
      const first = unfold(cutStep.first);
      if (batchBytes) first.push(batchBytes);
      const given = { first, moments: unfold(cutStep.moments), sizes, workspace };
      return (most) => run(ledger, { ...given, limit: most });
    });
    const longer = runs[runs.length - 1], more = model.num_units - model.cuts[runs.length - 1].num_units;
    if (!more) return longer(limit);
    const atShort = runs[0](null), atLonger = longer(null);
    const each = (atLonger.reserved - atShort.reserved) / (model.cuts[1].num_units - model.cuts[0].num_units);
    let reserved = rounded(atLonger.reserved + more * each);
    if (limit !== null && reserved > limit) {
      // On the cut model, what the limit leaves when the other units have theirs.
      reserved = longer(Math.max(limit - rounded(more * each), 0)).reserved + rounded(more * each);
    }
    return { reserved, slack: atLonger.slack };
  }

  return { reserve, rounded };
})();
