// Attention maps: rows are queries, columns keys. Cells are told by pointing at them or with the arrow keys.
function bytes(text) {
  const letters = atob(text);
  const found = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at++) found[at] = letters.charCodeAt(at);
  return found;
}

function half(bits) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  const size =
    exponent === 0
      ? fraction * 2 ** -24
      : exponent === 31
        ? fraction
          ? NaN
          : Infinity
        : (1 + fraction / 1024) * 2 ** (exponent - 15);
  return bits & 32768 ? -size : size;
}

function decoded(map) {
  if (!map.arrays) {
    const pair = (raw) => new Uint16Array(raw.buffer); // little-endian, as every browser's machine is
    map.arrays = {
      weights: bytes(map.weights),
      content: pair(bytes(map.content)),
      distances: pair(bytes(map.distances)),
      nothing: bytes(map.null),
    };
  }
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
  const level = arrays.weights[place];
  const score = half(arrays.content[place]).toFixed(2);
  if (level === 0) return `${first}\nscore ${score}\ndistance: not counted\nweight 0: dropped`;
  const weight = ((level - 1) / 63) ** 2;
  const weighed = weight < 0.0005 ? "below 0.0005" : weight.toFixed(3);
  return `${first}\nscore ${score}\ndistance ${count(arrays.distances[place])}\nweight ${weighed}`;
}

function mapGrid(map, layer, head) {
  const arrays = decoded(map);
  const [rows, columns] = [map.rows.length, map.columns.length];
  const start = (layer * map.heads.length + head) * rows;
  const z = [];
  const text = [];
  const nothing = [];
  for (let row = 0; row < rows; row++) {
    const from = (start + row) * columns;
    z.push(Array.from(arrays.weights.subarray(from, from + columns), (level) => (level ? (level - 1) / 63 : null)));
    text.push(map.columns.map((_, column) => plain(cellText(map, layer, head, row, column))));
    if (arrays.nothing[start + row]) nothing.push(row);
  }
  return { z, text, nothing };
}

const longest = (symbols) => Math.max(...symbols.map((symbol) => Math.min(9, visibleSymbol(symbol).length))) - 1;

function axisTicks(symbols, room, mark) {
  const every = Math.max(1, Math.ceil(symbols.length / room));
  const chosen = symbols.map((_, index) => index).filter((index) => index % every === 0 || mark(index));
  return {
    tickmode: "array",
    tickfont: { size: room < 1.4 * symbols.length ? 8.5 : 11 },
    tickvals: chosen,
    ticktext: chosen.map((index) => plain(mark(index) + shortened(visibleSymbol(symbols[index]), 9))),
  };
}

function mapPanel(section, first) {
  const chosen = { map: first, layer: 0, head: 0, row: 0, column: 0 };
  const plot = element("div", {
    class: "plot map",
    tabindex: "0",
    role: "group",
    "aria-label": "Attention map. Arrow keys go from cell to cell.",
  });
  const readout = element("output", { class: "readout", "aria-live": "polite" });
  const choosers = element("div", { class: "chooser" });
  const caption = element("figcaption");
  const map = () => section.maps[chosen.map];

  function refill() {
    const each = (name, of) =>
      chooser(name, of, 0, (index) => {
        chosen[name.toLowerCase()] = index;
        draw();
      });
    [chosen.layer, chosen.head, chosen.row, chosen.column] = [0, 0, map().rows.length - 1, 0];
    const runs = section.maps.map((other) => other.label);
    choosers.replaceChildren(
      chooser("Run", runs, chosen.map, (index) => {
        chosen.map = index;
        refill();
        choosers.querySelector("select").focus();
      }),
      each("Layer", map().layers.map(String)),
      each("Head", map().heads.map(String)),
    );
    draw();
  }
  function tell(row, column) {
    [chosen.row, chosen.column] = [row, column];
    readout.textContent = cellText(map(), chosen.layer, chosen.head, row, column);
  }
  function cursor() {
    const [x, y] = [chosen.column, chosen.row];
    return { type: "rect", x0: x - 0.5, x1: x + 0.5, y0: y - 0.5, y1: y + 0.5, line: { color: "#D55E00", width: 2 } };
  }
  function draw() {
    const grid = mapGrid(map(), chosen.layer, chosen.head);
    const width = plot.clientWidth;
    const marked = new Set(map().marked);
    const nothing = new Set(grid.nothing);
    const [rows, columns] = [map().rows.length, map().columns.length];
    const height = Math.max(260, Math.min(720, 90 + (width - 120) * (rows / columns)));
    const scale = THEME.dark
      ? [
          [0, "#26323c"],
          [0.35, "#2f6d97"],
          [0.7, "#7cc3f0"],
          [1, "#fff6cf"],
        ]
      : [
          [0, "#e9f1f7"],
          [0.35, "#8fc0e0"],
          [0.7, "#2477b0"],
          [1, "#08264a"],
        ];
    const nullRows = grid.nothing.map((row) => ({
      type: "rect",
      xref: "paper",
      x0: 0,
      x1: 1,
      y0: row - 0.5,
      y1: row + 0.5,
      fillcolor: "rgba(230,159,0,0.28)",
      line: { width: 0 },
      layer: "above",
    }));
    const axis = { showgrid: false, zeroline: false, fixedrange: true, ticks: "" };
    const letters = map().symbols.every((symbol) => symbol.length < 2);
    const layout = {
      ...baseLayout(),
      dragmode: false,
      width,
      height,
      margin: {
        l: 56 + 6 * longest(map().row_symbols),
        r: 8,
        t: 8,
        b: 44 + (letters ? 0 : 6 * longest(map().symbols)),
      },
      plot_bgcolor: colourOf("gap"),
      xaxis: {
        ...axis,
        title: { text: "keys" },
        range: [-0.5, columns - 0.5],
        tickangle: letters ? 0 : -90,
        ...axisTicks(map().symbols, (width - 90) / (letters ? 7 : 10), () => ""),
      },
      yaxis: {
        ...axis,
        title: { text: "queries" },
        range: [rows - 0.5, -0.5],
        ...axisTicks(
          map().row_symbols,
          (height - 80) / 8.5,
          (row) => (marked.has(map().rows[row]) ? "▸ " : "") + (nothing.has(row) ? "∅ " : ""),
        ),
      },
      shapes: document.activeElement === plot ? [...nullRows, cursor()] : nullRows,
    };
    const trace = {
      type: "heatmap",
      z: grid.z,
      text: grid.text,
      hoverinfo: "text",
      showscale: width > 420,
      zmin: 0,
      zmax: 1,
      colorscale: scale,
      colorbar: {
        thickness: 10,
        outlinewidth: 0,
        tickvals: [0, 0.1, 0.3162, 0.7071, 1],
        ticktext: ["0", "0.01", "0.1", "0.5", "1"],
        title: { text: "weight", font: { size: 11 } },
        len: 0.9,
      },
    };
    Plotly.react(plot, [trace], layout, PLOT_SETTINGS);
    const words = [`${map().title}.`];
    if (marked.size) words.push("▸ an answer is due.");
    if (nothing.size) words.push("∅ keeps no key.");
    caption.textContent = words.join(" ");
    tell(Math.min(chosen.row, rows - 1), Math.min(chosen.column, columns - 1));
    if (!plot.dataset.heard) {
      plot.dataset.heard = "yes";
      plot.on("plotly_hover", (event) => tell(event.points[0].y, event.points[0].x));
    }
  }
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const within = (value, size) => Math.max(0, Math.min(size - 1, value));
    tell(within(chosen.row + step[0], map().rows.length), within(chosen.column + step[1], map().columns.length));
    Plotly.relayout(plot, { shapes: [...plot.layout.shapes.filter((shape) => shape.xref === "paper"), cursor()] });
  });
  redraws.push(draw);
  return { figure: element("figure", {}, choosers, plot, caption, readout), draw: refill };
}
