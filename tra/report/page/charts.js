// Curves: a line per group with its range or error bars, and open marks for other test sets of the same length.
const SYMBOLS = "circle square diamond triangle-up cross x star triangle-down pentagon hexagon2".split(" ");
const DASHES = ["solid", "dash", "dot", "dashdot"];
const WIDE = 700; // pixels, from which on a chart has a legend

// Which groups the charts of a section show. `listeners` are called when that changes.
function shownGroups(section) {
  const state = { shown: section.groups.map(() => true), listeners: [] };
  state.set = (wish) => {
    state.shown = section.groups.map((_, index) => wish(index));
    for (const listener of state.listeners) listener();
  };
  state.toggle = (index) => state.set((other) => state.shown[other] !== (other === index));
  state.only = (index) => {
    const isAlone = state.shown[index] && state.shown.filter(Boolean).length === 1;
    state.set((other) => other === index || isAlone);
  };
  return state;
}

function mechanismList(section, state) {
  const choices = section.groups.map((group, index) => {
    const box = element("input", { type: "checkbox", onchange: () => state.toggle(index) });
    const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
    const paint = () => {
      box.checked = state.shown[index];
      swatch.style.background = tinted(group.colour);
    };
    paint();
    redraws.push(paint);
    state.listeners.push(paint);
    const title = group.label.length > 40 ? group.label.slice(0, 500) : null;
    return element("label", { title }, box, swatch, isolated(shortened(group.label, 40)));
  });
  const button = (text, shown) => element("button", { type: "button", onclick: () => state.set(() => shown) }, text);
  if (choices.length > 2) choices.push(button("All", true), button("None", false));
  const legend = element("legend", {}, "Mechanisms in the charts");
  return element("fieldset", { class: "mechanisms" }, legend, element("div", { class: "choices" }, ...choices));
}

function traces(section, chart, measure, state, legend) {
  const isTraining = chart.kind === "training";
  const named = new Set();
  return measure.lines.flatMap((line) => {
    const group = section.groups[line.group];
    const label = shortened(group.label, 40);
    const colour = tinted(group.colour);
    const shared = {
      type: "scatter",
      x: line.x,
      name: plain(label),
      visible: state.shown[line.group] || "legendonly", // so that the legend can switch it on again
      legendgroup: String(line.group),
      zorder: line.group, // of lines in one place all show: the later one is thinner, with another mark
      meta: { group: line.group },
    };
    const banded = line.several && !line.alone && line.x.length > 1;
    const band = {
      ...shared,
      x: [...line.x, ...[...line.x].reverse()],
      y: [...line.high, ...[...line.low].reverse()],
      mode: "lines",
      line: { width: 0 },
      fill: "toself",
      fillcolor: tinted(group.colour, 0.12),
      hoverinfo: "skip",
      showlegend: false,
      name: `${plain(label)} (range)`,
    };
    const array = line.high.map((high, index) => Math.max(0, high - line.y[index]));
    const arrayminus = line.low.map((low, index) => Math.max(0, line.y[index] - low));
    const hasBars = !banded && !isTraining && array.concat(arrayminus).some((part) => part > 0);
    const bars = { type: "data", array, arrayminus, symmetric: false, width: 3, thickness: 1.2 };
    const symbol = SYMBOLS[line.group % SYMBOLS.length];
    const drawn = {
      ...shared,
      y: line.y,
      mode: line.alone ? "markers" : isTraining && line.x.length > 30 ? "lines" : "lines+markers",
      showlegend: legend && !line.alone && !named.has(line.group),
      line: { color: colour, width: Math.max(1.5, 5.5 - 1.3 * line.group), dash: DASHES[line.group % DASHES.length] },
      marker: { color: colour, size: line.alone ? 9 : 7, symbol: line.alone ? `${symbol}-open` : symbol },
      error_y: { ...bars, color: tinted(group.colour, 0.7), visible: hasBars },
      text: line.text.map((text) => plain(`${label}\n${text}`)),
      hovertemplate: "%{text}<extra></extra>",
    };
    if (!line.alone) named.add(line.group);
    return banded ? [band, drawn] : [drawn];
  });
}

// A tick for every length that was measured, as far as there is room.
function lengthTicks(measure, width) {
  const values = [...new Set(measure.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const apart = (values.at(-1) / values[0]) ** (45 / width); // what 45 pixels span
  const tickvals = [];
  for (const value of values) if (!tickvals.length || value >= apart * tickvals.at(-1)) tickvals.push(value);
  const ticktext = tickvals.map((value) => (value % 1024 ? count(value) : `${count(value / 1024)}k`));
  return { tickvals, ticktext, tickangle: 0 };
}

// Powers of ten where there are many, else also numbers between them, written out.
function logTicks(measure) {
  const values = measure.lines.flatMap((line) => [...line.low, ...line.high]).filter((value) => value > 0);
  if (!values.length) return {};
  const [least, most] = [Math.min(...values), Math.max(...values)].map(Math.log10);
  if (most - least > 2.2) return { dtick: 1 };
  const steps = most - least > 0.8 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
  const tickvals = [];
  for (let power = Math.floor(least) - 1; power <= most + 1; power++)
    tickvals.push(...steps.map((step) => step * 10 ** power));
  return { tickvals, ticktext: tickvals.map((tick) => (tick >= 1000 ? count(tick) : String(+tick.toPrecision(2)))) };
}

function chartLayout(chart, measure, width, legend) {
  const [line, quietColour] = [colourOf("line"), colourOf("quiet")];
  const axis = { gridcolor: line, zeroline: false, linecolor: line, fixedrange: !withMouse() };
  const legendHeight = 21 * measure.lines.filter((each) => !each.alone).length + 90;
  const layout = {
    height: width < WIDE ? 310 : legend ? Math.max(400, legendHeight) : 380,
    margin: { l: 52, r: 12, t: chart.trained ? 24 : 12, b: 48 },
    hovermode: "closest",
    showlegend: legend,
    legend: { font: { size: 12 }, itemsizing: "constant", tracegroupgap: 0 },
    xaxis: { ...axis, title: { text: plain(chart.x_title) }, type: chart.x_log ? "log" : "linear" },
    yaxis: { ...axis, title: { text: "" }, exponentformat: "power", type: measure.log ? "log" : "linear" },
  };
  if (chart.x_log) Object.assign(layout.xaxis, lengthTicks(measure, width));
  if (measure.log) Object.assign(layout.yaxis, logTicks(measure));
  if (measure.unit) {
    const most = Math.max(...measure.lines.flatMap((each) => each.high));
    layout.yaxis.range = [-0.03 * Math.max(most, 0.01), most > 0.6 ? 1.04 : 1.15 * Math.max(most, 0.01)];
  }
  if (chart.trained) {
    const x = chart.trained;
    const dotted = { color: quietColour, width: 1, dash: "dot" };
    layout.shapes = [{ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: dotted }];
    const text = { text: "trained length", font: { size: 11, color: quietColour }, showarrow: false, yshift: -2 };
    const corner = { y: 1, yref: "paper", yanchor: "bottom", xanchor: "left" };
    layout.annotations = [{ ...text, ...corner, x: chart.x_log ? Math.log10(x) : x }];
  }
  return layout;
}

// One chart with its caption and, where there are several measures, a chooser. `legend` asks for Plotly's own.
function chartFigure(section, chart, state, first, legend) {
  let measure = chart.measures[first];
  const plot = element("div", { class: "plot", "data-kind": chart.kind });
  const caption = element("figcaption");
  const figure = element("figure", {}, caption);
  const clicked = (change) => (event) => {
    change(event.data[event.curveNumber].meta.group);
    return false; // Plotly's own answer would change this chart alone
  };
  const handlers = { plotly_legendclick: clicked(state.toggle), plotly_legenddoubleclick: clicked(state.only) };
  function draw() {
    const isTested = chart.kind === "length" || chart.kind === "perplexity";
    const hasSeeds = measure.lines.some((line) => line.several);
    const range = hasSeeds ? " Bands: lowest to highest seed." : isTested ? " Bars: 95 % intervals." : "";
    const others = measure.lines.some((line) => line.alone) ? " Open marks: other test sets of that length." : "";
    caption.textContent = `${capitalised(measure.title)}.${range}${others}`;
    const width = plot.clientWidth;
    const hasLegend = legend && width >= WIDE;
    const layout = chartLayout(chart, measure, width, hasLegend);
    drawPlot(plot, traces(section, chart, measure, state, hasLegend), layout, handlers);
  }
  if (chart.measures.length > 1) {
    const titles = chart.measures.map((each) => each.title);
    const choose = (index) => {
      measure = chart.measures[index];
      draw();
    };
    figure.append(element("div", { class: "chooser" }, chooser("Show", titles, first, choose)));
  }
  figure.append(plot);
  redraws.push(draw);
  state.listeners.push(draw);
  return { figure, draw };
}
