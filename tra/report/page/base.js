// What all parts share: elements, colours, the theme, and drawing with Plotly.
const DATA = JSON.parse(document.getElementById("data").textContent);
const THEME = { dark: false };
const redraws = []; // a function per chart, called when the theme or the width changes

// Strings become text nodes: nothing that a run holds is read as HTML.
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Text of runs may run from right to left. It must not turn what stands around it.
const isolated = (text) => element("bdi", {}, text);

function shortened(text, length) {
  const letters = [...text];
  return letters.length > length ? letters.slice(0, length - 1).join("") + "…" : text;
}

// Plotly reads some tags and entities in its labels. Text must stay text; only our line breaks are tags.
function plain(text) {
  const entities = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };
  return text.replace(/[&<>]/g, (sign) => entities[sign]).replace(/\n/g, "<br>");
}

const { format: count } = new Intl.NumberFormat("en-GB");
const capitalised = (text) => text[0].toUpperCase() + text.slice(1);
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// The colour of a mechanism, brighter on a dark page where it is dark itself.
function tinted(colour, opacity = 1) {
  const parts = [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16));
  const brightness = (0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2]) / 255;
  const lift = THEME.dark ? 1.3 * Math.max(0, 0.5 - brightness) : 0;
  return `rgba(${parts.map((part) => Math.round(part + (255 - part) * lift)).join(",")},${opacity})`;
}

function chooser(label, options, chosen, change) {
  const select = element("select", { onchange: () => change(Number(select.value)) });
  select.append(...options.map((text, index) => element("option", { value: index }, shortened(text, 70))));
  select.value = chosen;
  return element("label", {}, label, select);
}

const folded = (title, ...children) =>
  element("details", {}, element("summary", {}, isolated(title)), element("div", {}, ...children));
const quiet = (text) => element("p", { class: "quiet" }, text);
const sideBySide = (parts) => element("div", { class: parts.length > 1 ? "pair two" : "pair" }, ...parts);
const withMouse = () => matchMedia("(pointer: fine)").matches;

function drawPlot(plot, traces, layout, handlers) {
  const ink = colourOf("ink");
  const shared = {
    width: plot.clientWidth,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: ink },
    hoverlabel: { bgcolor: colourOf("card"), bordercolor: colourOf("line"), font: { color: ink }, align: "left" },
    dragmode: withMouse() ? "zoom" : false,
  };
  const isNew = !plot.data;
  Plotly.react(plot, traces, { ...shared, ...layout }, { displayModeBar: false, doubleClick: "reset" });
  if (isNew) for (const [event, handler] of Object.entries(handlers)) plot.on(event, handler);
}

function applyTheme(dark) {
  THEME.dark = dark;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.getElementById("theme").setAttribute("aria-pressed", String(dark));
  for (const redraw of redraws) redraw();
}

function watchTheme() {
  const preference = matchMedia("(prefers-color-scheme: dark)");
  let chosen = false;
  applyTheme(preference.matches);
  preference.addEventListener("change", () => chosen || applyTheme(preference.matches));
  document.getElementById("theme").addEventListener("click", () => {
    chosen = true;
    applyTheme(!THEME.dark);
  });
  let width = innerWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // only the height: a phone shows and hides its bars
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => applyTheme(THEME.dark), 100);
  });
  let before = false; // paper is light, and narrower than most screens
  const print = (bodyWidth, dark) => {
    document.body.style.width = bodyWidth;
    applyTheme(dark);
  };
  addEventListener("beforeprint", () => {
    before = THEME.dark;
    print("44rem", false);
  });
  addEventListener("afterprint", () => print("", before));
}
