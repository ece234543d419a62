// Attention maps: rows are queries, columns keys. Pointing at a cell, or the arrow keys, tell its numbers.
const SCALES = {
  light: [[0, "#e9f1f7"], [0.35, "#8fc0e0"], [0.7, "#2477b0"], [1, "#08264a"]],
  dark: [[0, "#26323c"], [0.35, "#2f6d97"], [0.7, "#7cc3f0"], [1, "#fff6cf"]],
};
const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

// A float16 from its bits.
function half(bits) {
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  let size = (1 + fraction / 1024) * 2 ** (exponent - 15);
  if (exponent === 0) size = fraction * 2 ** -24;
  if (exponent === 31) size = fraction ? NaN : Infinity;
  return bits & 32768 ? -size : size;
}

function decoded(map) {
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const pairs = (text) => new Uint16Array(bytes(text).buffer); // little-endian, as every browser's machine is
  map.arrays ??= {
    weights: bytes(map.weights),
    content: pairs(map.content),
    distances: pairs(map.distances),
    uncounted: bytes(map.uncounted), // empty where every key that stays counts
    nothing: bytes(map.null),
  };
  return map.arrays;
}

const visibleSymbol = (symbol) =>
  symbol.trim() === "" ? symbol.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "∅" : symbol;

function cellText(map, layer, head, row, column) {
  const arrays = decoded(map);
  const place = ((layer * map.heads.length + head) * map.rows.length + row) * map.columns.length + column;
  const [query, key] = [map.rows[row], map.columns[column]];
  const quoted = (symbol) => `“${shortened(visibleSymbol(symbol), 24)}”`;
  const first = `query ${query} ${quoted(map.row_symbols[row])}, key ${key} ${quoted(map.symbols[column])}`;
  if (key > query) return `${first}\nnot seen: the key comes later`;
  const score = half(arrays.content[place]).toFixed(2);
  const level = arrays.weights[place];
  if (level === 0) return `${first}\nscore ${score}\ndistance: not counted\nweight 0: dropped`;
  const weight = ((level - 1) / 63) ** 2;
  const weightText = weight < 0.0005 ? "below 0.0005" : weight.toFixed(3);
  const margin = arrays.uncounted[place] ? ", doesn't count itself" : "";
  return `${first}\nscore ${score}\ndistance ${count(arrays.distances[place])}${margin}\nweight ${weightText}`;
}

// The cells of a head: weights by their square root, texts, keys that stay without counting, and the rows that keep no key.
function mapGrid(map, layer, head) {
  const { weights, uncounted, nothing } = decoded(map);
  const columns = map.columns.length;
  const start = (layer * map.heads.length + head) * map.rows.length;
  const level = (row, column) => weights[(start + row) * columns + column];
  const grid = (cell) => map.rows.map((_, row) => map.columns.map((_, column) => cell(row, column)));
  return {
    z: grid((row, column) => (level(row, column) ? (level(row, column) - 1) / 63 : null)),
    inside: grid((row, column) => uncounted[(start + row) * columns + column] === 1),
    text: grid((row, column) => plain(cellText(map, layer, head, row, column))),
    nothing: map.rows.map((_, row) => row).filter((row) => nothing[start + row]),
  };
}

// Small frames around the keys that stay without counting; `size` is the width of a cell in pixels.
function frames(inside, size) {
  const marker = { symbol: "square-open", color: colourOf("quiet"), opacity: 0.55, size: Math.max(2, 0.6 * size) };
  const cells = inside.flatMap((cells, row) => cells.flatMap((cell, column) => (cell ? [[row, column]] : [])));
  return {
    type: "scatter",
    mode: "markers",
    x: cells.map(([, column]) => column),
    y: cells.map(([row]) => row),
    marker: { ...marker, line: { width: 1 } },
    hoverinfo: "skip",
    showlegend: false,
  };
}

// Room for the longest of the symbols beside an axis, in pixels.
const symbolRoom = (symbols) => 6 * Math.max(...symbols.map((symbol) => Math.min(9, visibleSymbol(symbol).length))) - 6;

// Pixels that a label of the keys takes: of letters, which stand, or of words, which lie.
const labelWidth = (symbols) => (symbols.every((symbol) => symbol.length < 2) ? 7 : 10);
const LABEL_ROOM = 90; // pixels of a map that are left and right of its keys
const NARROW = 500; // pixels

// Symbols on an axis, as many as there is room for, and all that have a mark.
function symbolTicks(symbols, room, mark) {
  const every = Math.max(1, Math.ceil(symbols.length / room));
  const tickvals = symbols.map((_, index) => index).filter((index) => index % every === 0 || mark(index));
  const ticktext = tickvals.map((index) => plain(mark(index) + shortened(visibleSymbol(symbols[index]), 9)));
  return { tickmode: "array", tickfont: { size: room < 1.4 * symbols.length ? 8.5 : 11 }, tickvals, ticktext };
}

function mapLayout(map, width, nothing) {
  const [rows, columns] = [map.rows.length, map.columns.length];
  const labelled = Math.min(640, 82 + 8.5 * rows); // with a label for every query
  const height = Math.max(260, labelled, Math.min(720, 90 + (width - 120) * (rows / columns)));
  const letters = map.symbols.every((symbol) => symbol.length < 2);
  const mark = (row) => (map.marked.includes(map.rows[row]) ? "▸ " : "") + (nothing.includes(row) ? "∅ " : "");
  const axis = { showgrid: false, zeroline: false, fixedrange: true, ticks: "" };
  const left = 56 + symbolRoom(map.row_symbols);
  return {
    dragmode: false,
    height,
    margin: { l: left, r: 8, t: 8, b: 44 + (letters ? 0 : symbolRoom(map.symbols)) },
    plot_bgcolor: colourOf("gap"),
    xaxis: {
      ...axis,
      title: { text: "keys" },
      range: [-0.5, columns - 0.5],
      tickangle: letters ? 0 : -90,
      ...symbolTicks(map.symbols, (width - LABEL_ROOM) / labelWidth(map.symbols), () => ""),
    },
    yaxis: {
      ...axis,
      title: { text: "queries" },
      range: [rows - 0.5, -0.5],
      ...symbolTicks(map.row_symbols, (height - 80) / 8.5, mark),
    },
  };
}

// One map with choosers of run, layer and head. `first` is the run that is shown at the start.
function mapPanel(section, first) {
  const chosen = { map: first, layer: 0, head: 0, row: 0, column: 0 };
  const label = "Attention map. Arrow keys go from cell to cell.";
  const plot = element("div", { class: "plot map", tabindex: "0", role: "group", "aria-label": label });
  const readout = element("output", { class: "readout", "aria-live": "polite" });
  const choosers = element("div", { class: "chooser" });
  const caption = element("figcaption");
  const map = () => section.maps[chosen.map];
  const band = (y) => ({ type: "rect", y0: y - 0.5, y1: y + 0.5 });

  function refill() {
    const [layer, head] = map().topHead; // indices
    Object.assign(chosen, { layer, head, row: map().rows.length - 1, column: 0 });
    const part = (name, numbers, first) => {
      const choose = (index) => {
        chosen[name.toLowerCase()] = index;
        draw();
      };
      return chooser(name, numbers.map(String), first, choose);
    };
    const chooseRun = (index) => {
      chosen.map = index;
      refill();
      choosers.querySelector("select").focus();
    };
    const runs = section.maps.map((other) => other.label);
    const run = chooser("Run", runs, chosen.map, chooseRun);
    choosers.replaceChildren(run, part("Layer", map().layers, layer), part("Head", map().heads, head));
    draw();
  }
  function tell(row, column) {
    const within = (value, size) => Math.max(0, Math.min(size - 1, value));
    chosen.row = within(row, map().rows.length);
    chosen.column = within(column, map().columns.length);
    readout.textContent = cellText(map(), chosen.layer, chosen.head, chosen.row, chosen.column);
  }
  function cursor() {
    const x = chosen.column;
    return { ...band(chosen.row), x0: x - 0.5, x1: x + 0.5, line: { color: "#D55E00", width: 2 } };
  }
  function draw() {
    const { nothing, inside, ...grid } = mapGrid(map(), chosen.layer, chosen.head);
    const isNarrow = plot.parentElement.clientWidth < NARROW; // a phone: the map scrolls, so that every key has a label
    plot.style.minWidth = isNarrow ? `${LABEL_ROOM + map().columns.length * labelWidth(map().symbols)}px` : "";
    const layout = mapLayout(map(), plot.clientWidth, nothing);
    const tint = { fillcolor: "rgba(230,159,0,0.28)", line: { width: 0 }, layer: "above" };
    layout.shapes = nothing.map((row) => ({ ...band(row), ...tint, xref: "paper", x0: 0, x1: 1 }));
    if (document.activeElement === plot) layout.shapes.push(cursor());
    const ticks = { tickvals: [0, 0.1, 0.3162, 0.7071, 1], ticktext: ["0", "0.01", "0.1", "0.5", "1"] };
    const colorbar = { ...ticks, thickness: 10, outlinewidth: 0, title: { text: "weight", font: { size: 11 } }, len: 0.9 };
    const colours = { zmin: 0, zmax: 1, colorscale: THEME.dark ? SCALES.dark : SCALES.light, colorbar };
    const trace = { type: "heatmap", ...grid, ...colours, hoverinfo: "text", showscale: plot.clientWidth > 420 };
    const size = (plot.clientWidth - layout.margin.l - 80) / map().columns.length;
    const hasMargin = inside.some((cells) => cells.includes(true));
    drawPlot(plot, hasMargin ? [trace, frames(inside, size)] : [trace], layout, { plotly_hover: (event) => tell(event.points[0].y, event.points[0].x) });
    const due = map().marked.length ? " ▸ an answer is due." : "";
    const margin = hasMargin ? " □ stays in the softmax without counting as distance." : "";
    caption.textContent = `${map().title}.${due}${nothing.length ? " ∅ keeps no key." : ""}${margin}`;
    tell(chosen.row, chosen.column);
  }
  plot.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    tell(chosen.row + step[0], chosen.column + step[1]);
    Plotly.relayout(plot, { shapes: [...plot.layout.shapes.filter((shape) => shape.xref === "paper"), cursor()] });
  });
  redraws.push(draw);
  const wide = element("div", { class: "scrolled" }, plot);
  return { figure: element("figure", {}, choosers, wide, caption, readout), draw: refill };
}
