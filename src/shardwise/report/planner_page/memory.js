// The peak memory of a rank in a step: planner/memory/stream_peak.py, replay.py and column_sum.py.
"use strict";

const memoryModel = (() => {
  const ACTIVATION_BORN = 0, ACTIVATION_DIED = 1, COPY_BORN = 2, COPY_DIED = 3, GRADIENT_BORN = 4, SCRATCH = 5, COLUMN_SUM = 6;
  const CHANGE = 0, MOVE = 1, SAVED = 3;
  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

  // A law at one length of sample: [const, per sample].
  function lineOf(terms, seq) {
    if (terms.length === 2) return terms;
    const [c0, c1, c2, b0, b1, b2] = terms;
    return seq === null ? [c0, b0] : [c0 + (c1 + c2 * seq) * seq, b0 + (b1 + b2 * seq) * seq];
  }

  // The points [const, per sample, …] that no other point exceeds for every batch.
  function addHighest(points, point) {
    const [total, slope] = point;
    if (points.some(([c, p]) => c >= total && p >= slope)) return;
    let kept = 0;
    for (const other of points) if (other[0] > total || other[1] > slope) points[kept++] = other;
    points.length = kept;
    points.push(point);
  }

  // The peaks of a list of storage events, and its end. A height is [activations: const, per sample; weight
  // copies: const, per sample; gradients]; a point is [its sum, its sum per sample, height].
  function streamPeak(events, laws, seq, blockBytes) {
    const height = [0, 0, 0, 0, 0], points = [], sums = new Map(), grads = new Map();
    const point = (at) => [at[0] + at[2] + at[4], at[1] + at[3], at];
    for (let index = 0; index < events.length; index += 4) {
      const code = events[index], extra = events[index + 2];
      let [fixed, each] = lineOf(laws[events[index + 1]], seq);
      if (code === COLUMN_SUM) {
        const key = `${extra} ${fixed} ${each}`;
        if (!sums.has(key)) sums.set(key, { key, columns: extra, rows: [fixed, each], points: [] });
        addHighest(sums.get(key).points, point(height.slice()));
        continue;
      }
      if (each === 0) fixed = Math.ceil(fixed / blockBytes) * blockBytes;
      if (code === SCRATCH) {
        addHighest(points, point([height[0] + fixed, height[1] + each, height[2], height[3], height[4]]));
        continue;
      }
      const sign = code === ACTIVATION_DIED || code === COPY_DIED ? -1 : 1;
      if (code === GRADIENT_BORN) {
        height[4] += fixed;
        grads.set(extra, (grads.get(extra) ?? 0) + fixed);
      } else {
        const place = code === COPY_BORN || code === COPY_DIED ? 2 : 0;
        height[place] += sign * fixed;
        height[place + 1] += sign * each;
      }
      if (sign === 1) addHighest(points, point(height.slice()));
    }
    return { points, sums: [...sums.values()], end: height, grads: [...grads] };
  }

  // The bytes in which the sum of a matrix over its rows collects the sums of its thread blocks.
  function columnSumBytes(rows, columns) {
    if (!rows || !columns) return 0;
    const vector = [4, 2, 1].find((size) => columns % size === 0);
    const powerOfTwo = (number) => 2 ** Math.floor(Math.log2(number));
    const width = columns / vector, most = 512 / vector;
    const across = Math.min(powerOfTwo(width), most), down = Math.min(powerOfTwo(rows), most);
    const blockHeight = Math.min(down, Math.floor(most / Math.min(across, 32)));
    const blockWidth = Math.min(across, Math.floor(most / blockHeight));
    const values = Math.ceil(rows / blockHeight), grid = Math.ceil(width / blockWidth);
    const fullGrid = 132 * Math.floor(2048 / (blockWidth * blockHeight));
    if (rows < Math.min(blockHeight * 16, 256) || values < 256 || grid > fullGrid) return 0;
    const blocks = Math.max(Math.min(Math.ceil(fullGrid / grid), Math.ceil(values / 16)), Math.ceil(values / 256));
    return blocks > 1 ? 4 * columns * blocks * blockWidth * vector : 0;
  }

  // A step with the numbers of a column: those that do not differ between columns are single values.
  function numbered(step, column) {
    const number = (place) => { const value = step.columns[place]; return Array.isArray(value) ? value[column] : value; };
    return { ...step, number };
  }

  // What the forward of each unit saves for backward, by the number of the unit: [const, per sample].
  function savedLines(model, { way, streams }) {
    const { storages } = model.ways[way].whole;
    return new Map(model.saved.map(([unit, row]) => { const { end } = streams(storages[row]); return [unit, [end[0], end[1]]]; }));
  }

  // Bytes in host memory on one rank: states and, if activations wait there, what units save and, once, what they share.
  function hostLine(model, { step, way, seq, streams, keepsActivations }) {
    const states = step.number(step.host);
    if (!keepsActivations) return [states, 0];
    const lines = [...savedLines(model, { way, streams }).values()];
    const shared = model.ways[way].shared.map((law) => lineOf(model.laws[law], seq)).filter(([, each]) => each === 0);
    return [states + sum([...lines, ...shared].map(([fixed]) => fixed)), sum(lines.map(([, each]) => each))];
  }

  // Replays the rows of a step: bytes by category, and the peaks, one of which is the highest at any batch.
  function replay(model, { step, way, seq, streams }) {
    const index = (category) => model.categories.indexOf(category);
    const ACTIVATIONS = index("activations"), GATHERED = index("gathered"), REDUCE = index("reduce");
    const { number } = step, { storages } = model.ways[way][step.length];
    let saved = null;
    const batch = lineOf(model.batch_bytes, seq);
    const fixed = step.at_rest.map(number), each = fixed.map(() => 0);
    fixed[ACTIVATIONS] += batch[0];
    each[ACTIVATIONS] += batch[1];
    const pending = new Map(), groups = new Map();
    let at = null;
    const see = (height, columnSum) => {
      const more = height ?? [0, 0, 0, 0, 0];
      const total = sum(fixed) + more[0] + more[2] + more[4], slope = sum(each) + more[1] + more[3];
      const key = columnSum ? columnSum.key : "";
      if (!groups.has(key)) groups.set(key, []);
      const group = groups.get(key);
      if (group.some(([c, p]) => c >= total && p >= slope)) return;
      const seenFixed = fixed.slice(), seenEach = each.slice();
      seenFixed[ACTIVATIONS] += more[0]; seenEach[ACTIVATIONS] += more[1];
      seenFixed[GATHERED] += more[2]; seenEach[GATHERED] += more[3];
      seenFixed[REDUCE] += more[4];
      const label = at ? `${model.triggers[at[0]]} ${model.units[at[1]]}` : "at rest";
      addHighest(group, [total, slope, { fixed: seenFixed, each: seenEach, label, columnSum }]);
    };
    const add = (height, times) => {
      fixed[ACTIVATIONS] += times * height[0]; each[ACTIVATIONS] += times * height[1];
      fixed[GATHERED] += times * height[2]; each[GATHERED] += times * height[3];
    };
    // Adds what the omitted units leave behind, after the last row of the unit that stands for them.
    let last = -1, leftOut = [];
    const follow = () => { leftOut.forEach((leave) => leave()); leftOut = []; };
    model.rows[step.length].forEach(([trigger, unit, repeats], row) => {
      at = [trigger, unit];
      if (unit !== last) follow();
      last = unit;
      for (const change of step.changes[row]) {
        if (change[0] === CHANGE) {
          const bytes = number(change[2]), isLeftOut = change[3] === 1;
          if (isLeftOut) leftOut.push(() => { fixed[change[1]] += bytes; });
          else {
            fixed[change[1]] += bytes;
            if (bytes > 0) see();
          }
        } else if (change[0] === MOVE) {
          const bytes = number(change[3]);
          fixed[change[1]] -= bytes;
          fixed[change[2]] += bytes;
        } else if (change[0] === SAVED) {
          saved ??= savedLines(model, { way, streams });
          const sign = change[2] ? -1 : 1, [bytes, bytesEach] = saved.get(change[1]).map((one) => sign * one);
          fixed[ACTIVATIONS] += bytes;
          each[ACTIVATIONS] += bytesEach;
          if (bytes > 0 || bytesEach > 0) see();
        } else {
          fixed[REDUCE] -= pending.get(change[1]) ?? 0;
          pending.delete(change[1]);
        }
      }
      const stored = storages[row];
      if (stored === undefined) return;
      const peak = streams(stored);
      for (const [, , height] of peak.points) see(height);
      for (const one of peak.sums) for (const [, , height] of one.points) see(height, one);
      add(peak.end, 1);
      fixed[REDUCE] += peak.end[4];
      for (const [owner, bytes] of peak.grads) {
        const of = owner === -1 ? unit : owner;
        pending.set(of, (pending.get(of) ?? 0) + bytes);
      }
      // Only activations; the engine frees gradients.
      leftOut.push(() => add(peak.end, repeats - 1));
    });
    at = null;
    if (groups.size === 0) see();
    return [...groups.values()].flat();
  }

  // The highest peak at a batch: total bytes, and the peak.
  function highest(peaks, batch) {
    let best = null;
    for (const [total, slope, peak] of peaks) {
      const extra = peak.columnSum ? columnSumBytes(peak.columnSum.rows[0] + peak.columnSum.rows[1] * batch, peak.columnSum.columns) : 0;
      const bytes = total + slope * batch + extra;
      if (best === null || bytes > best.bytes) best = { bytes, extra, peak };
    }
    return best;
  }

  function breakdown(found, categories, batch) {
    const bytes = found.peak.fixed.map((fixed, place) => fixed + found.peak.each[place] * batch);
    bytes[categories.indexOf("activations")] += found.extra;
    return bytes;
  }

  const codes = { ACTIVATION_BORN, ACTIVATION_DIED, COPY_BORN, COPY_DIED, GRADIENT_BORN, SCRATCH, COLUMN_SUM, CHANGE, MOVE, SAVED };
  return { lineOf, streamPeak, columnSumBytes, numbered, savedLines, hostLine, replay, highest, breakdown, codes };
})();
