"use strict";
// The interactive figure of mechanism.html: one query, its keys as bars by score, the threshold and the lower cut as lines to drag.
(() => {
  const SCORES = [1.6, -0.7, 0.4, -1.6, 2.2, -0.4, -2.3, 0.9, -1.2, 1.3];
  const NOISE = [-0.6, -1.8, -1.1];
  const TOP = 20, HEIGHT = 230, LEFT = 34, GUTTER = 122; // of the plot of scores; the gutter has the lines' names
  const WIDE = 720, NARROW = 430, TALL = 466;
  const HIGHEST = 3, LOWEST = -4;
  const ROWS = { distance: 306, weight: 444 };
  const WEIGHT_HEIGHT = 100;

  const find = (name) => document.getElementById(`tra-${name}`);
  const plot = find("plot"), summary = find("summary");
  const inputs = { threshold: find("threshold"), margin: find("margin"), gate: find("gate") };
  const initial = Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value]));
  let keys, right;

  const place = (score) => TOP + ((HIGHEST - score) / (HIGHEST - LOWEST)) * HEIGHT;
  const scoreAt = (y) => HIGHEST - ((y - TOP) / HEIGHT) * (HIGHEST - LOWEST);
  const value = (name) => Number(inputs[name].value);
  const sign = (number, digits = 1) => number.toFixed(digits).replace("-", "−").replace(/^−(0\.?0*)$/, "$1");

  function element(name, attributes, text = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, content] of Object.entries(attributes)) made.setAttribute(key, content);
    made.textContent = text;
    return made;
  }

  /** Return each key's state, distance and weight: the definition, from the newest key to the oldest. */
  function attention(scores, threshold, margin, gate) {
    let counted = 0;
    const cut = Number((threshold - margin).toFixed(1)); // scores and sliders have one digit
    const found = scores.map((score) => ({ score, counts: score > threshold, stays: score > cut }));
    for (const key of [...found].reverse()) {
      key.distance = 1 + counted;
      counted += key.counts ? 1 : 0;
      key.weight = key.stays ? Math.exp(key.score + gate * key.distance) : 0;
    }
    const sum = found.reduce((total, key) => total + key.weight, 0);
    for (const key of found) key.weight = sum > 0 ? key.weight / sum : 0;
    return found;
  }

  const handles = {};

  /** Make a line that can be dragged, or moved by the arrow keys; `move` takes a score. */
  function handle(name, label, move) {
    const group = element("g", { class: `tra-line tra-${name}`, tabindex: 0, role: "slider", "aria-label": label, "aria-orientation": "vertical" });
    // where the lines lie on each other, the threshold is taken from above and the cut from below
    group.append(
      element("rect", { class: "tra-grip", x: LEFT, y: name === "cut" ? 3 : -17, height: 20 }),
      element("line", { x1: LEFT, y1: 0, y2: 0 }),
      element("circle", { cy: 0, r: 9 }),
      element("text", { y: 5 }),
    );
    group.addEventListener("pointerdown", (event) => {
      group.setPointerCapture(event.pointerId);
      group.focus();
      event.preventDefault();
    });
    group.addEventListener("pointermove", (event) => {
      if (!group.hasPointerCapture(event.pointerId)) return;
      const box = plot.getBoundingClientRect();
      move(scoreAt(((event.clientY - box.top) / box.height) * plot.viewBox.baseVal.height));
    });
    group.addEventListener("keydown", (event) => {
      const step = { ArrowUp: 0.1, ArrowRight: 0.1, ArrowDown: -0.1, ArrowLeft: -0.1, PageUp: 1, PageDown: -1 }[event.key];
      if (step === undefined) return;
      move(Number(group.getAttribute("aria-valuenow")) + step);
      event.preventDefault();
    });
    handles[name] = group;
  }

  function set(name, number) {
    inputs[name].value = number; // held to its range and step by the browser
    draw();
  }

  handle("threshold", "threshold: keys above it count", (score) => set("threshold", score));
  handle("cut", "lower cut: keys at or below it leave", (score) => set("margin", value("threshold") - score));
  const drawing = element("g", {});
  plot.append(drawing, handles.threshold, handles.cut);

  /** Fit the drawing to the screen, and the lines to the drawing. */
  function layOut() {
    const width = plot.clientWidth < 520 ? NARROW : WIDE;
    right = width - GUTTER;
    plot.setAttribute("viewBox", `0 0 ${width} ${TALL}`);
    for (const [name, group] of Object.entries(handles)) {
      group.querySelector("rect").setAttribute("width", right - LEFT - 14);
      group.querySelector("line").setAttribute("x2", right);
      group.querySelector("circle").setAttribute("cx", name === "cut" ? right - 32 : right);
      group.querySelector("text").setAttribute("x", right + 14);
    }
    draw();
  }

  function moveLine(name, score, text, label) {
    handles[name].setAttribute("transform", `translate(0 ${place(score)})`);
    handles[name].setAttribute("aria-valuenow", score.toFixed(1));
    handles[name].setAttribute("aria-valuemin", name === "cut" ? value("threshold") - 4 : -2);
    handles[name].setAttribute("aria-valuemax", name === "cut" ? value("threshold") : 3);
    handles[name].setAttribute("aria-valuetext", text);
    handles[name].querySelector("text").textContent = label;
  }

  function draw() {
    const [threshold, margin, gate] = [value("threshold"), value("margin"), value("gate")];
    const found = attention(keys, threshold, margin, gate);
    const width = (right - LEFT) / found.length;
    const full = Math.max(0.5, ...found.map((key) => key.weight)); // the weight of the highest bar there can be
    drawing.replaceChildren(
      element("line", { class: "tra-zero", x1: LEFT, x2: right, y1: place(0), y2: place(0) }),
      ...[2, 0, -2, -4].map((score) => element("text", { class: "tra-tick", x: LEFT - 8, y: place(score) + 5 }, sign(score, 0))),
      element("text", { class: "tra-label", x: 4, y: 12 }, "score of each key"),
      element("text", { class: "tra-label", x: 4, y: ROWS.distance - 20 }, "distance n"),
      element("text", { class: "tra-label", x: 4, y: ROWS.weight - WEIGHT_HEIGHT - 10 }, "weight"),
      element("line", { class: "tra-zero", x1: LEFT, x2: right, y1: ROWS.weight, y2: ROWS.weight }),
      element("text", { class: "tra-label", x: LEFT, y: TOP + HEIGHT + 4 }, "← oldest"),
      element("text", { class: "tra-label tra-end", x: right, y: TOP + HEIGHT + 4 }, "newest →"),
    );
    found.forEach((key, number) => {
      const [x, state] = [LEFT + width * number, key.counts ? "counts" : key.stays ? "stays" : "leaves"];
      const middle = x + width / 2;
      const bar = element("rect", {
        class: `tra-key tra-${state}`, x: x + width * 0.18, width: width * 0.64,
        y: Math.min(place(0), place(key.score)), height: Math.abs(place(0) - place(key.score)), "data-weight": key.weight.toFixed(6),
      });
      const words = `key ${number + 1}: score ${sign(key.score)}, ${state}, distance ${key.stays ? key.distance : "none"}, weight ${key.weight.toFixed(3)}`;
      bar.append(element("title", {}, words));
      drawing.append(
        bar,
        element("text", { class: `tra-number tra-${state}`, x: middle, y: ROWS.distance }, key.stays ? String(key.distance) : "–"),
        element("rect", { class: `tra-weight tra-${state}`, x: x + width * 0.18, width: width * 0.64, y: ROWS.weight - (key.weight / full) * WEIGHT_HEIGHT, height: (key.weight / full) * WEIGHT_HEIGHT }),
        element("text", { class: "tra-share", x: middle, y: ROWS.weight + 15 }, key.stays && width > 26 ? key.weight.toFixed(2).replace(/^0/, "") : ""),
      );
    });
    const cut = threshold - margin;
    moveLine("threshold", threshold, `${sign(threshold)}: above it a key counts`, `θ = ${sign(threshold)}`);
    moveLine("cut", cut, `${sign(cut)}: at or below it a key leaves`, margin > 0.4 ? `θ − m = ${sign(cut)}` : "");
    for (const [name, input] of Object.entries(inputs)) input.nextElementSibling.textContent = sign(value(name), name === "gate" ? 2 : 1);
    const [counted, kept] = [found.filter((key) => key.counts).length, found.filter((key) => key.stays).length];
    const [stay, leave] = [kept - counted, keys.length - kept];
    const said = [
      ["counts", `${counted} ${counted === 1 ? "counts" : "count"}`],
      ["stays", `${stay} ${stay === 1 ? "stays" : "stay"} inside the margin`],
      ["leaves", `${leave} ${leave === 1 ? "leaves" : "leave"}`],
    ];
    if (kept) {
      summary.replaceChildren(`${keys.length} keys: `);
      said.forEach(([state, words], number) => {
        const swatch = document.createElement("span");
        swatch.className = `tra-swatch tra-${state}`;
        summary.append(swatch, words, number < 2 ? ", " : ".");
      });
    } else summary.textContent = `${keys.length} keys, and all leave: a null row. Its output is 0.`;
  }

  function reset() {
    keys = [...SCORES];
    for (const [name, input] of Object.entries(inputs)) input.value = initial[name];
    find("noise").disabled = false;
    layOut();
  }

  for (const input of Object.values(inputs)) input.addEventListener("input", draw);
  find("reset").addEventListener("click", reset);
  find("noise").addEventListener("click", () => {
    keys = keys.flatMap((score, number) => (number === 2 || number === 6 ? [score, ...NOISE.map((noise) => noise - 0.1 * (number - 2))] : [score]));
    find("noise").disabled = keys.length > 22;
    draw();
  });
  reset();
  new ResizeObserver(layOut).observe(plot);
})();
