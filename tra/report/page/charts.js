// Curves: a line a group, its band or error bars, and points beside it for other test sets of the same length.
const SYMBOLS = [
  "circle",
  "square",
  "diamond",
  "triangle-up",
  "cross",
  "x",
  "star",
  "triangle-down",
  "pentagon",
  "hexagon2",
];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const WIDE = 700;

function traces(section, chart, measure, state, legend) {
  const drawn = [];
  const named = new Set();
  for (const line of measure.lines) {
    const group = section.groups[line.group];
    const colour = tinted(group.colour);
    const label = plain(shortened(group.label, 40));
    const visible = state.shown[line.group] || "legendonly"; // so that the legend can switch it on again
    const shared = {
      x: line.x,
      visible,
      legendgroup: String(line.group),
      zorder: section.groups.length - line.group,
      meta: { group: line.group },
    };
    const training = chart.kind === "training";
    const banded = line.several && !line.alone && line.x.length > 1;
    if (banded) {
      drawn.push({
        ...shared,
        x: [...line.x, ...[...line.x].reverse()],
        y: [...line.high, ...[...line.low].reverse()],
        type: "scatter",
        mode: "lines",
        line: { width: 0 },
        fill: "toself",
        fillcolor: rgb(colour, 0.12),
        hoverinfo: "skip",
        showlegend: false,
        name: `${label} (range)`,
      });
    }
    const above = line.high.map((high, index) => Math.max(0, high - line.y[index]));
    const below = line.low.map((low, index) => Math.max(0, line.y[index] - low));
    drawn.push({
      ...shared,
      y: line.y,
      type: "scatter",
      mode: line.alone ? "markers" : training && line.x.length > 30 ? "lines" : "lines+markers",
      name: label,
      showlegend: legend && !line.alone && !named.has(line.group),
      line: { color: rgb(colour), width: 2, dash: DASHES[group.variant % DASHES.length] },
      marker: {
        color: rgb(colour),
        size: line.alone ? 9 : 7,
        symbol: SYMBOLS[line.group % SYMBOLS.length] + (line.alone ? "-open" : ""),
      },
      error_y: {
        type: "data",
        array: above,
        arrayminus: below,
        symmetric: false,
        width: 3,
        thickness: 1.2,
        color: rgb(colour, 0.7),
        visible: !banded && !training && above.concat(below).some((part) => part > 0),
      },
      text: line.text.map((text) => plain(`${shortened(group.label, 40)}\n${text}`)),
      hovertemplate: "%{text}<extra></extra>",
    });
    if (!line.alone) named.add(line.group);
  }
  return drawn;
}

function lengthTicks(measure, log, width) {
  if (!log) return {};
  const values = [...new Set(measure.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const apart = (values.at(-1) / values[0]) ** (45 / width); // what 45 pixels span
  const kept = [];
  for (const value of values) if (!kept.length || value >= apart * kept.at(-1)) kept.push(value);
  return {
    tickvals: kept,
    tickangle: 0,
    ticktext: kept.map((value) => (value % 1024 ? count(value) : `${count(value / 1024)}k`)),
  };
}

// Powers of ten where there are many, else numbers between them too, written out.
function logTicks(measure) {
  const values = measure.lines.flatMap((line) => [...line.low, ...line.high]).filter((value) => value > 0);
  if (!values.length) return {};
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const decades = Math.log10(most / least);
  if (decades > 2.2) return { dtick: 1 };
  const ticks = [];
  for (let power = Math.floor(Math.log10(least)) - 1; power <= Math.log10(most) + 1; power++) {
    for (const step of decades > 0.8 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8]) ticks.push(step * 10 ** power);
  }
  return {
    tickvals: ticks,
    ticktext: ticks.map((tick) => (tick >= 1000 ? count(tick) : String(+tick.toPrecision(2)))),
  };
}

function chartLayout(chart, measure, width, legend) {
  const line = colourOf("line");
  const axis = {
    gridcolor: line,
    zeroline: false,
    linecolor: line,
    fixedrange: !matchMedia("(pointer: fine)").matches,
  };
  const layout = {
    ...baseLayout(),
    width,
    height:
      width < WIDE ? 310 : legend ? Math.max(400, 21 * measure.lines.filter((each) => !each.alone).length + 90) : 380,
    margin: { l: 52, r: 12, t: 12, b: 48 },
    hovermode: "closest",
    showlegend: legend,
    legend: { font: { size: 12 }, itemsizing: "constant", tracegroupgap: 0 },
    xaxis: {
      ...axis,
      title: { text: plain(chart.x_title) },
      type: chart.x_log ? "log" : "linear",
      ...lengthTicks(measure, chart.x_log, width),
    },
    yaxis: { ...axis, title: { text: "" }, exponentformat: "power", type: measure.log ? "log" : "linear" },
    shapes: [],
    annotations: [],
  };
  if (measure.log) Object.assign(layout.yaxis, logTicks(measure));
  if (measure.unit) {
    const most = Math.max(...measure.lines.flatMap((each) => each.high));
    layout.yaxis.range = [-0.03 * Math.max(most, 0.01), most > 0.6 ? 1.04 : 1.15 * Math.max(most, 0.01)];
  }
  if (chart.trained) {
    layout.shapes.push({
      type: "line",
      x0: chart.trained,
      x1: chart.trained,
      y0: 0,
      y1: 1,
      yref: "paper",
      line: { color: colourOf("quiet"), width: 1, dash: "dot" },
    });
    layout.annotations.push({
      x: chart.x_log ? Math.log10(chart.trained) : chart.trained,
      y: 1,
      yref: "paper",
      yanchor: "bottom",
      xanchor: "left",
      text: "trained length",
      showarrow: false,
      font: { size: 11, color: colourOf("quiet") },
      yshift: -2,
    });
    layout.margin.t = 24;
  }
  return layout;
}

// One chart with its caption and, where there are several measures, a chooser. `legend` asks for Plotly's own.
function chartFigure(section, chart, state, first, legend) {
  let chosen = first;
  const plot = element("div", { class: "plot", "data-kind": chart.kind });
  const caption = element("figcaption");
  const figure = element("figure", {}, caption);
  if (chart.measures.length > 1) {
    const titles = chart.measures.map((measure) => measure.title);
    figure.append(
      element(
        "div",
        { class: "chooser" },
        chooser("Show", titles, first, (index) => {
          chosen = index;
          draw();
        }),
      ),
    );
  }
  figure.append(plot);
  function draw() {
    const measure = chart.measures[chosen];
    const beside = measure.lines.some((line) => line.alone) ? " Open marks: other test sets of that length." : "";
    const title = measure.title[0].toUpperCase() + measure.title.slice(1);
    const several = measure.lines.some((line) => line.several);
    const tested = chart.kind === "length" || chart.kind === "perplexity";
    const range = several ? " Bands: lowest to highest seed." : tested ? " Bars: 95 % intervals." : "";
    caption.textContent = `${title}.${range}${beside}`;
    const width = plot.clientWidth;
    const shown = legend && width >= WIDE;
    Plotly.react(
      plot,
      traces(section, chart, measure, state, shown),
      chartLayout(chart, measure, width, shown),
      PLOT_SETTINGS,
    );
    if (!plot.dataset.heard) {
      plot.dataset.heard = "yes";
      plot.on("plotly_legendclick", (event) => {
        state.toggle(event.data[event.curveNumber].meta.group);
        return false;
      });
      plot.on("plotly_legenddoubleclick", (event) => {
        state.only(event.data[event.curveNumber].meta.group);
        return false;
      });
    }
  }
  redraws.push(draw);
  state.listeners.push(draw);
  return { figure, draw };
}
