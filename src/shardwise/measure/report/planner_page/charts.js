// The charts of the page. They are given all values, and compute only positions.
"use strict";

const charts = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const GIB = 2 ** 30;

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    return fill(made, attributes, children);
  }

  function svg(tag, attributes = {}, ...children) {
    return fill(document.createElementNS(SVG, tag), attributes, children);
  }

  function fill(made, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(name, value);
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  const percent = (share) => `${(100 * share).toFixed(3)}%`;
  const gib = (bytes) => `${(bytes / GIB).toFixed(1)} GiB`;

  const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

  function significant(number, digits = 3) {
    if (number === 0) return "0";
    const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(number))));
    return places === 0 ? whole.format(number) : number.toFixed(Math.min(places, 6));
  }

  function seconds(number) {
    if (number >= 1) return `${significant(number)} s`;
    return number >= 1e-3 ? `${significant(number * 1e3)} ms` : `${significant(number * 1e6)} µs`;
  }

  // Round numbers from 0 to `most`, about `count` of them, as on the axes of the report (axes.py).
  function roundTicks(most, count) {
    const size = 10 ** Math.floor(Math.log10(most / count)), step = size * [1, 2, 5, 10].find((one) => most / (size * one) <= count);
    return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, index) => index * step);
  }

  function key(list, names) {
    list.replaceChildren(...names.map(([name, label]) => element("li", {}, element("i", { class: name }), label ?? name)));
  }

  const fitWords = { yes: "fits", tight: "tight", no: "does not fit" };

  // One bar per strategy: its bytes as parts [name, bytes], and the capacity as a line. Without `onChoose` none can be chosen.
  function memoryBars(home, { rows, capacity, chosen, onChoose }) {
    const most = Math.max(capacity * 1.08, ...rows.map((row) => Math.min(row.device, capacity * 2.5)));
    const drawn = rows.map((row) => {
      let at = 0;
      const rects = row.parts.filter(([, bytes]) => bytes > 0).map(([name, bytes]) => {
        const from = Math.min(at / most, 1);
        at += bytes;
        const width = Math.min(at / most, 1) - from;
        return svg("rect", { class: name, x: percent(from), y: 0, width: percent(width), height: 24 }, svg("title", {}, `${name}: ${gib(bytes)}`));
      });
      const limit = svg("line", { class: "limit", x1: percent(capacity / most), x2: percent(capacity / most), y1: -4, y2: 28 });
      const isCut = row.device > most * 1.0001;
      const cut = isCut ? [svg("text", { class: "cut", x: "100%", y: 18, dx: -4, "text-anchor": "end" }, "»", svg("title", {}, `the bar goes on to ${gib(row.device)}`))] : [];
      const words = `${row.label}: ${gib(row.device)} of ${gib(capacity)}${isCut ? "; the bar is cut" : ""}`;
      const track = svg("svg", { class: "track", height: 24, role: "img", "aria-label": words }, ...rects, limit, ...cut);
      const button = element("button", { type: "button", "aria-pressed": row === chosen, "data-strategy": row.name, disabled: onChoose ? null : "" },
        row.label, element("small", {}, `micro-batch ${row.batch}`));
      if (onChoose) button.addEventListener("click", () => onChoose(row));
      const value = element("div", { class: "value" }, gib(row.device), element("small", { class: row.fits }, fitWords[row.fits]));
      return element("div", { class: "bar" }, element("div", { class: "label" }, button), track, value);
    });
    const label = svg("text", { class: "limit", x: percent(Math.min(capacity / most, 1)), y: 14, "text-anchor": "end", dx: -4 }, `limit ${gib(capacity)}`);
    const axis = element("div", { class: "bar axis" }, element("span"), svg("svg", { class: "track", height: 18, "aria-hidden": "true" }, label), element("span"));
    home.replaceChildren(...drawn, axis);
  }

  // The kind of a span, which is its colour.
  const COMPUTED = ["forward", "backward", "update"];
  function kindOf({ queue, name }) {
    const word = name.split(" ")[0];
    return queue !== "compute" ? queue : COMPUTED.includes(word) ? word : "copy";
  }

  // Lanes of a step from the spans of `plan --timeline`. Spans shorter than a pixel are merged with the next one. A span
  // that ends after the step ends in the next step, which looks the same: that part is drawn at the beginning.
  function lanes(home, { spans, total }) {
    const rows = new Map([["compute", []], ["gather", []], ["reduce", []]]);
    const all = spans.map((span) => ({ kind: kindOf(span), queue: span.queue, name: span.name, start: span.start_seconds, end: span.end_seconds }));
    const wrapped = all.filter((span) => span.end > total).map((span) => ({ ...span, start: Math.max(span.start - total, 0), end: span.end - total }));
    const inside = all.filter((span) => span.start < total).map((span) => ({ ...span, end: Math.min(span.end, total) }));
    for (const span of [...wrapped, ...inside]) {
      const list = rows.get(span.queue) ?? rows.get("reduce"), last = list[list.length - 1];
      if (last && last.kind === span.kind && span.start - last.end < total / 900) last.end = Math.max(span.end, last.end);
      else list.push({ ...span });
    }
    const drawn = [...rows].filter(([lane, list]) => list.length || lane === "compute")
      .map(([lane, list]) => element("div", { class: "bar" }, element("div", { class: "label" }, lane), laneOf(lane, list, total)));
    const anchor = (share) => (share === 0 ? "start" : share > 0.95 ? "end" : "middle");
    const ticks = roundTicks(total, home.clientWidth < 480 ? 3 : 6).map((time) =>
      svg("text", { class: "tick", x: percent(time / total), y: 12, "text-anchor": anchor(time / total) }, time === 0 ? "0" : seconds(time)));
    drawn.push(element("div", { class: "bar axis" }, element("span"), svg("svg", { class: "track", height: 16, "aria-hidden": "true" }, ...ticks)));
    home.replaceChildren(...drawn);
  }

  // One path for all spans of a kind: one element per span would take the browser longer than planning takes.
  function laneOf(lane, list, total) {
    const shapes = new Map(), place = (time) => ((1000 * time) / total).toFixed(2);
    for (const { kind, start, end } of list) shapes.set(kind, `${shapes.get(kind) ?? ""}M${place(start)} 0V22H${place(end)}V0Z`);
    const title = svg("title"), back = svg("rect", { class: "lane", x: 0, y: 0, width: 1000, height: 22 });
    const label = `${lane}: busy ${percent(list.reduce((sum, one) => sum + one.end - one.start, 0) / total)}`;
    const made = svg("svg", { class: "track", height: 22, viewBox: "0 0 1000 22", preserveAspectRatio: "none", role: "img", "aria-label": label },
      title, back, ...[...shapes].map(([kind, d]) => svg("path", { class: kind, d })));
    made.addEventListener("pointermove", (event) => {
      const box = made.getBoundingClientRect(), at = (total * (event.clientX - box.left)) / box.width;
      const under = list.find(({ start, end }) => start <= at && at <= end);
      title.textContent = under ? `${under.name}: ${seconds(under.end - under.start)}` : "";
    });
    return made;
  }

  const nameOf = (point) => (point.label ?? "").split(",")[0];

  // The points whose texts fit next to each other, from the last one on, which always has its text. A text is centred on
  // its point; the last one ends at the edge.
  function apart(points, { x, text, end }) {
    const found = new Set();
    let free = Infinity;
    for (const point of [...points].reverse()) {
      const size = 8 * text(point).length + 8, right = x(point.budget) === end ? end : x(point.budget) + size / 2;
      if (right > free) continue;
      found.add(point);
      free = right - size;
    }
    return found;
  }

  // Throughput by memory budget, as steps: points {budget, value, label}; value is null if nothing fits.
  function frontier(home, { points, unit, now }) {
    const width = Math.max(home.clientWidth, 280), height = 240, left = 58, right = 16, top = 20, bottom = 34;
    const most = Math.max(...points.map((point) => point.value ?? 0));
    if (most === 0) {
      home.replaceChildren(element("p", {}, "No plan fits with any budget up to this one."));
      return;
    }
    const largest = points[points.length - 1].budget;
    const x = (budget) => left + ((width - left - right) * budget) / largest, y = (value) => height - bottom - ((height - top - bottom) * value) / (most * 1.12);
    const parts = roundTicks(most * 1.1, 5).flatMap((value) => [
      svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: left - 8, y: y(value) + 4, "text-anchor": "end" }, significant(value)),
    ]);
    const fitting = points.filter((point) => point.value !== null);
    const path = fitting.map((point, index) => `${index ? "H" : "M"}${x(point.budget)}${index ? "V" : " "}${y(point.value)}`).join("");
    const end = x(largest);
    parts.push(svg("path", { class: "frontier-area", d: `${path}H${end}V${y(0)}H${x(fitting[0].budget)}Z` }), svg("path", { class: "frontier-line", d: `${path}H${end}` }));
    const changes = points.filter((point, index) => point.value !== null && (index === 0 || nameOf(points[index - 1]) !== nameOf(point)));
    const ticked = apart(points, { x, text: (point) => gib(point.budget), end }), named = apart(changes, { x, text: nameOf, end });
    const anchor = (point) => (x(point.budget) === end ? "end" : "middle");
    points.forEach((point) => {
      if (ticked.has(point)) parts.push(svg("text", { class: "tick", x: x(point.budget), y: height - bottom + 18, "text-anchor": anchor(point) }, gib(point.budget)));
      if (point.value === null) return;
      const chosen = point === now;
      parts.push(svg("circle", { class: chosen ? "dot chosen" : "dot", cx: x(point.budget), cy: y(point.value), r: 5 }, svg("title", {}, `${gib(point.budget)}: ${point.label}, ${significant(point.value)} ${unit}`)));
      if (named.has(point)) parts.push(svg("text", { class: "name", x: x(point.budget), y: y(point.value) - 12, "text-anchor": anchor(point) }, nameOf(point)));
    });
    parts.push(svg("text", { class: "tick", x: 0, y: 12 }, unit));
    home.replaceChildren(svg("svg", { width: "100%", height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Highest throughput: ${fitting.map((point) => `${gib(point.budget)}: ${significant(point.value)} ${unit} with ${point.label}`).join("; ")}` }, ...parts));
  }

  function table(home, head, rows) {
    const line = (tag, cells) => cells.map((cell) => element(tag, {}, cell));
    home.replaceChildren(
      element("thead", {}, element("tr", {}, ...line("th", head))),
      element("tbody", {}, ...rows.map(({ cells, chosen }) => element("tr", { class: chosen ? "chosen" : null }, ...line("td", cells)))),
    );
  }

  return { element, key, memoryBars, lanes, frontier, table, gib, significant, whole, seconds, fitWords };
})();
