// Computes what PyTorch's caching allocator reserves for a step: planner/memory/allocator.py and reserved.py.
"use strict";

const allocatorModel = (() => {
  const MIB = 2 ** 20, ROUND = 512, SMALL = MIB, LARGE_SEGMENT = 20 * MIB, LEAST_OWN = 10 * MIB, SEGMENT_ROUND = 2 * MIB;
  // The distance between two segments: larger than any segment, and small enough that all addresses are exact.
  const SEGMENT_GAP = 2 ** 40;
  const IS_SMALL = -1;
  const roundUp = (bytes, to) => Math.ceil(bytes / to) * to;

  const segmentBytes = (size) => (size < LEAST_OWN ? LARGE_SEGMENT : roundUp(size, SEGMENT_ROUND));

  // Rounds as Python does: halves to the even number.
  function rounded(number) {
    const whole = Math.round(number);
    return Math.abs(number % 1) === 0.5 && whole % 2 !== 0 ? whole - 1 : whole;
  }

  // The blocks above 1 MiB of one stream. An allocation takes the smallest free block that is large enough, of several the
  // one at the lowest address, and splits it if enough is left. Each new segment lies below the previous ones.
  // A block is a number, from 1 on; arrays hold its size, its address, its neighbours in the segment (0: none) and
  // whether it is free. `free` has the free blocks ordered by (size, address), and `freeSizes` their sizes.
  class CachingAllocator {
    constructor(limit, mostBlocks) {
      Object.assign(this, { limit, isOver: false, reserved: 0, most: 0, allocated: 0, count: 0, numFree: 0, numSegments: 0 });
      Object.assign(this, { size: new Float64Array(mostBlocks), before: new Int32Array(mostBlocks), after: new Int32Array(mostBlocks) });
      Object.assign(this, { address: new Float64Array(mostBlocks), isFree: new Uint8Array(mostBlocks), free: new Int32Array(mostBlocks), freeSizes: new Float64Array(mostBlocks) });
    }

    // The place of (size, address) among the free blocks.
    place(size, address) {
      const { free, freeSizes, address: addresses } = this;
      let low = 0, high = this.numFree;
      while (low < high) {
        const middle = (low + high) >> 1, one = freeSizes[middle];
        if (one < size || (one === size && addresses[free[middle]] < address)) low = middle + 1; else high = middle;
      }
      return low;
    }

    put(block, place) {
      this.free[place] = block;
      this.freeSizes[place] = this.size[block];
      this.isFree[block] = 1;
    }

    insert(block) {
      const { free, freeSizes } = this, place = this.place(this.size[block], this.address[block]);
      for (let index = this.numFree++; index > place; index--) { free[index] = free[index - 1]; freeSizes[index] = freeSizes[index - 1]; }
      this.put(block, place);
    }

    remove(place) {
      const { free, freeSizes } = this, last = --this.numFree;
      for (let index = place; index < last; index++) { free[index] = free[index + 1]; freeSizes[index] = freeSizes[index + 1]; }
    }

    // Inserts a block into the list and removes the one at `from`: only the blocks between their places move.
    exchange(from, block) {
      const { free, freeSizes } = this;
      let to = this.place(this.size[block], this.address[block]);
      if (to > from) {
        to -= 1;
        for (let index = from; index < to; index++) { free[index] = free[index + 1]; freeSizes[index] = freeSizes[index + 1]; }
      } else for (let index = from; index > to; index--) { free[index] = free[index - 1]; freeSizes[index] = freeSizes[index - 1]; }
      this.put(block, to);
    }

    made(size, address, before, after) {
      const block = ++this.count;
      this.size[block] = size;
      this.address[block] = address;
      this.before[block] = before;
      this.after[block] = after;
      return block;
    }

    allocate(bytes) {
      const size = roundUp(bytes, ROUND), place = this.place(size, -Infinity), isThere = place < this.numFree;
      const block = isThere ? this.free[place] : this.segment(segmentBytes(size)), left = this.size[block] - size;
      if (left > SMALL) {
        const after = this.after[block], rest = this.made(left, this.address[block] + size, block, after);
        if (after) this.before[after] = rest;
        this.after[block] = rest;
        this.size[block] = size;
        if (isThere) this.exchange(place, rest); else this.insert(rest);
      } else if (isThere) this.remove(place);
      this.isFree[block] = 0;
      this.allocated += this.size[block];
      return block;
    }

    // The size of the block that an allocation would take; 0 if it would need a new segment.
    taken(bytes) {
      const size = roundUp(bytes, ROUND), place = this.place(size, -Infinity);
      if (place === this.numFree) return 0;
      const whole = this.freeSizes[place];
      return whole - size > SMALL ? size : whole;
    }

    // Makes a new segment, even beyond the limit, if releasing free segments is not enough.
    segment(size) {
      if (this.limit !== null && this.reserved + size > this.limit) this.giveBack();
      this.reserved += size;
      this.most = Math.max(this.most, this.reserved);
      this.isOver ||= this.limit !== null && this.reserved > this.limit;
      return this.made(size, -++this.numSegments * SEGMENT_GAP, 0, 0);
    }

    // Releases the free blocks that are complete segments.
    giveBack() {
      let kept = 0;
      for (let index = 0; index < this.numFree; index++) {
        const block = this.free[index];
        if (this.before[block] || this.after[block]) {
          this.free[kept] = block;
          this.freeSizes[kept++] = this.size[block];
        } else this.reserved -= this.size[block];
      }
      this.numFree = kept;
    }

    release(block) {
      const { size, address, before, after, isFree } = this, left = before[block], right = after[block];
      let from = -1;
      this.allocated -= size[block];
      if (left && isFree[left]) {
        from = this.place(size[left], address[left]);
        size[block] += size[left];
        address[block] = address[left];
        before[block] = before[left];
        if (before[block]) after[before[block]] = block;
      }
      if (right && isFree[right]) {
        const place = this.place(size[right], address[right]);
        if (from < 0) from = place; else { this.remove(place); if (place < from) from -= 1; }
        size[block] += size[right];
        after[block] = after[right];
        if (after[block]) before[after[block]] = block;
      }
      if (from < 0) this.insert(block); else this.exchange(from, block);
    }
  }

  // Runs the allocator on steps: {ledger, sizes of its kinds}. Small blocks are only counted, since they share segments.
  class Run {
    constructor({ first, later }, { limit, abandons }) {
      // Each allocation makes at most two blocks: a segment, and the rest of it.
      const numAllocations = first.ledger.slots.length + 2 * later.ledger.slots.length + first.ledger.first.length + first.ledger.moments.length + 3;
      const allocator = new CachingAllocator(limit, 2 * numAllocations + 1), numSlots = Math.max(first.ledger.numSlots, later.ledger.numSlots);
      Object.assign(this, { numSlots, abandons, allocator, small: 0, mostSmall: 0, peak: 0, slack: 0, slackAtPeak: 0 });
      // The block of each slot (0: none), and its bytes.
      Object.assign(this, { blocks: new Int32Array(numSlots + 1), bytes: new Float64Array(numSlots + 1) });
    }

    allocate(bytes) {
      if (bytes <= SMALL) {
        this.small += bytes;
        this.mostSmall = Math.max(this.mostSmall, this.small);
        return IS_SMALL;
      }
      const { allocator } = this, block = allocator.allocate(bytes);
      this.slack += allocator.size[block] - bytes;
      this.see(allocator.allocated, this.slack);
      return block;
    }

    see(allocated, slack) {
      if (allocated <= this.peak) return;
      this.peak = allocated;
      this.slackAtPeak = slack;
    }

    // Allocates and releases at once, which leaves the free blocks unchanged.
    pass(bytes) {
      const { allocator } = this, taken = bytes <= SMALL ? 0 : allocator.taken(bytes);
      if (bytes <= SMALL) this.mostSmall = Math.max(this.mostSmall, this.small + bytes);
      else if (taken) this.see(allocator.allocated + taken, this.slack + taken - bytes);
      else this.free(this.allocate(bytes), bytes);
    }

    free(block, bytes) {
      if (block === IS_SMALL) { this.small -= bytes; return; }
      this.slack -= this.allocator.size[block] - bytes;
      this.allocator.release(block);
    }

    // Replays the entries of a step from `from` to `to`.
    replay({ ledger, sizes }, from, to) {
      const { allocator, blocks, bytes, abandons } = this, { slots, sizes: kinds } = ledger;
      for (let index = from; index < to && !(abandons && allocator.isOver); index++) {
        const slot = slots[index], kind = kinds[index];
        if (slot === 0) this.pass(sizes[kind]);
        else if (kind >= 0) {
          bytes[slot] = sizes[kind];
          blocks[slot] = this.allocate(sizes[kind]);
        } else this.end(slot, slot);
      }
    }

    // Frees everything of a step. Slots are in the order in which they were allocated.
    end(from = 1, to = this.numSlots) {
      for (let slot = from; slot <= to; slot++) {
        if (this.blocks[slot] !== 0) this.free(this.blocks[slot], this.bytes[slot]);
        this.blocks[slot] = 0;
      }
    }
  }

  // Runs three steps: the first one allocates the optimizer's state, in memory that the first backward has freed, and the
  // workspace of backward. With `abandons`, returns null as soon as more than the limit is reserved.
  function run(steps, { batchBytes, workspace, limit, abandons }) {
    const one = new Run(steps, { limit, abandons }), { first, later } = steps, { ledger } = first;
    for (const bytes of ledger.first) one.allocate(bytes);
    if (batchBytes) one.allocate(batchBytes);
    one.allocate(workspace / 2);
    one.replay(first, 0, ledger.firstGradAt);
    one.allocate(workspace / 2);
    one.replay(first, ledger.firstGradAt, ledger.updateAt);
    for (const bytes of ledger.moments) one.allocate(bytes);
    one.replay(first, ledger.updateAt, ledger.slots.length);
    for (let step = 2; step <= 3; step++) {
      one.end();
      if (step === 3) one.peak = 0;
      one.replay(later, 0, later.ledger.slots.length);
    }
    if (abandons && one.allocator.isOver) return null;
    return { reserved: one.allocator.most + roundUp(one.mostSmall, 2 * MIB), slack: one.slackAtPeak };
  }

  function sizesOf(model, ledger, { seq, batch }) {
    return Float64Array.from(ledger.kinds, ({ bytes, law, columns }) => {
      if (law === undefined) return bytes;
      const line = memoryModel.lineOf(model.laws[law], seq), size = line[0] + line[1] * batch;
      return columns ? memoryModel.columnSumBytes(size, columns) : size;
    });
  }

  // What a plan reserves at one batch, on a device that has `limit` bytes for tensors. With `abandons`, null if that is
  // more than the limit.
  function reserve(model, { step, way, seq, batch, limit, workspace, ledgerOf, abandons }) {
    const batchLine = memoryModel.lineOf(model.batch_bytes, seq), batchBytes = batchLine[0] + batchLine[1] * batch;
    const runs = model.cuts.map((cut, index) => {
      const made = (isFirst) => new allocationLedger.Ledger(model, cut, { number: step.number, way }, step.cuts[index], isFirst);
      const ledgers = ledgerOf(index, () => {
        const later = made(false);
        return { first: step.cuts[index].first_changes.length ? made(true) : later, later };
      });
      const sized = (ledger) => ({ ledger, sizes: sizesOf(model, ledger, { seq, batch }) });
      const later = sized(ledgers.later), first = ledgers.first === ledgers.later ? later : sized(ledgers.first);
      return (most) => run({ first, later }, { batchBytes, workspace, limit: most, abandons });
    });
    const longer = runs[runs.length - 1], more = model.num_units - model.cuts[runs.length - 1].num_units;
    if (!more) return longer(limit);
    const atShort = runs[0](null), atLonger = longer(null);
    const each = (atLonger.reserved - atShort.reserved) / (model.cuts[1].num_units - model.cuts[0].num_units);
    const others = rounded(more * each);
    let reserved = rounded(atLonger.reserved + more * each);
    if (limit !== null && reserved > limit) {
      // The shortened model gets what the limit leaves after the other units.
      const limited = longer(Math.max(limit - others, 0));
      if (limited === null) return null;
      reserved = limited.reserved + others;
    }
    return { reserved, slack: atLonger.slack };
  }

  return { reserve, rounded };
})();
