// A step as the allocations and releases that the caching allocator sees: planner/memory/allocations.py.
"use strict";

const allocationLedger = (() => {
  const { ACTIVATION_DIED, COPY_DIED, GRADIENT_BORN, SCRATCH, COLUMN_SUM, CHANGE, MOVE, SAVED } = memoryModel.codes;

  // A step as single allocations and releases, in order. `slots` has the slot of each entry, 0 if it is released at once;
  // `sizes` has −1 for a release, else the index of its size in `kinds`: {bytes}, {law} or {law, columns}. `first` and
  // `moments` are the sizes of what is allocated before the first step and in its update. `firstGradAt` is the entry after
  // the first gradient of a parameter. With `isFirst` the entries are those of the first step, which gathers in another
  // order.
  class Ledger {
    constructor(model, cut, { number, way }, cutStep, isFirst = false) {
      Object.assign(this, { slots: [], sizes: [], kinds: [], kindOf: [0], updateAt: 0, firstGradAt: 0, numSlots: 0 });
      this.known = new Map();
      this.buffers = new Map();
      this.storages = new Map();
      this.byLaw = new Map();
      this.grads = new Map();
      const unfold = (groups) => groups.flatMap(([count, places]) => { const list = places.map(number); return Array.from({ length: count }, () => list).flat(); });
      Object.assign(this, { first: unfold(cutStep.first), moments: unfold(cutStep.moments) });
      const others = new Map(isFirst ? cutStep.first_changes : []);
      cut.rows.forEach((unit, row) => {
        if (row === cut.update) this.updateAt = this.slots.length;
        for (const change of others.get(row) ?? cutStep.changes[row]) this.change(change, number);
        const stored = cut.ways[way][row];
        if (stored !== undefined) this.stream(unit, model.storages[stored]);
      });
      // Gradients are freed when the next step begins.
      for (const [key, held] of this.buffers) if (key.startsWith(`${model.categories.indexOf("grads")} `)) held.forEach((slot) => this.release(slot));
      Object.assign(this, { slots: Int32Array.from(this.slots), sizes: Int32Array.from(this.sizes) });
    }

    kind(key, value) {
      if (!this.known.has(key)) { this.known.set(key, this.kinds.length); this.kinds.push(value); }
      return this.known.get(key);
    }

    allocate(kind) {
      this.slots.push(++this.numSlots);
      this.sizes.push(kind);
      this.kindOf.push(kind);
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
      } else if (change[0] === SAVED) this.moveSaved(change[1], change[2] === 1);
      else {
        for (const slot of (this.grads.get(change[1]) ?? new Map()).values()) this.release(slot);
        this.grads.delete(change[1]);
      }
    }

    // Releases the storages that a unit has left behind; or allocates them again, for backward to release.
    moveSaved(unit, toHost) {
      for (const [key, slot] of this.storages) {
        if (Math.floor(key / 65536) !== unit) continue;
        if (toHost) this.release(slot);
        else this.storages.set(key, this.allocate(this.kindOf[slot]));
      }
    }

    stream(unit, events) {
      for (let index = 0; index < events.length; index += 4) {
        const code = events[index], law = events[index + 1], extra = events[index + 2], ordinal = events[index + 3];
        const key = 65536 * unit + ordinal, ofRoot = 65536 * extra + ordinal;
        if (code === ACTIVATION_DIED || code === COPY_DIED) this.died(ordinal < 0 ? this.ofAnother(unit, law) : extra < 0 ? key : ofRoot, law);
        else if (code === SCRATCH || code === COLUMN_SUM) {
          const columns = code === COLUMN_SUM ? extra : 0;
          this.slots.push(0);
          this.sizes.push(this.kind(`l${law} ${columns}`, { law, columns }));
        } else {
          const slot = this.allocate(this.kind(`l${law} 0`, { law, columns: 0 }));
          if (code === GRADIENT_BORN) {
            const owner = extra < 0 ? unit : extra;
            if (!this.grads.has(owner)) this.grads.set(owner, new Map());
            this.grads.get(owner).set(key, slot);
            this.firstGradAt ||= this.slots.length;
          } else {
            this.storages.set(key, slot);
            if (!this.byLaw.has(law)) this.byLaw.set(law, []);
            this.byLaw.get(law).push(key);
          }
        }
      }
    }

    // The last storage of that size in another unit, since backward visits the units in reverse order.
    ofAnother(unit, law) {
      const keys = this.byLaw.get(law) ?? [];
      for (let index = keys.length - 1; index >= 0; index--) if (Math.floor(keys[index] / 65536) !== unit) return keys[index];
      return undefined;
    }

    died(key, law) {
      const slot = key === undefined ? undefined : this.storages.get(key);
      if (slot === undefined) return;
      this.storages.delete(key);
      const keys = this.byLaw.get(law);
      keys.splice(keys.lastIndexOf(key), 1);
      this.release(slot);
    }
  }

  return { Ledger };
})();
