// What all parts share: elements made of text, colours, and the state of a section.
const DATA = JSON.parse(document.getElementById("data").textContent);
const THEME = { dark: false };
const redraws = []; // one function a chart, called when the theme changes

// Strings become text nodes: nothing that a run holds is read as HTML.
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "colour") made.style.background = value;
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Text from runs may be of any direction, and stays among its own.
const isolated = (text) => element("bdi", {}, text);

function shortened(text, most) {
  const letters = [...text];
  return letters.length > most ? letters.slice(0, most - 1).join("") + "…" : text;
}

// Plotly reads a few tags and entities in its labels: here text is text. Line breaks are ours.
function plain(text) {
  const named = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };
  return text.replace(/[&<>]/g, (sign) => named[sign]).replace(/\n/g, "<br>");
}

const { format: count } = new Intl.NumberFormat("en-GB");
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Dark colours of mechanisms are lifted on a dark page.
function tinted(colour) {
  const parts = [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16));
  const bright = (0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2]) / 255;
  const lift = THEME.dark ? Math.max(0, 0.5 - bright) : 0;
  return parts.map((part) => Math.round(part + (255 - part) * lift * 1.3));
}
const rgb = (parts, opacity = 1) => `rgba(${parts.join(",")},${opacity})`;

function chooser(label, options, chosen, change) {
  const select = element("select", { onchange: () => change(Number(select.value)) });
  options.forEach((text, index) => select.append(element("option", { value: index }, shortened(text, 70))));
  select.value = chosen;
  return element("label", {}, label, select);
}

function baseLayout() {
  const ink = colourOf("ink");
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: ink },
    hoverlabel: { bgcolor: colourOf("card"), bordercolor: colourOf("line"), font: { color: ink }, align: "left" },
    dragmode: matchMedia("(pointer: fine)").matches ? "zoom" : false,
  };
}
const PLOT_SETTINGS = { displayModeBar: false, doubleClick: "reset" };

function applyTheme(dark) {
  THEME.dark = dark;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const button = document.getElementById("theme");
  button.setAttribute("aria-pressed", String(dark));
  for (const redraw of redraws) redraw();
}

function watchTheme() {
  const wish = matchMedia("(prefers-color-scheme: dark)");
  let chosen = false;
  applyTheme(wish.matches);
  wish.addEventListener("change", () => chosen || applyTheme(wish.matches));
  document.getElementById("theme").addEventListener("click", () => {
    chosen = true;
    applyTheme(!THEME.dark);
  });
  let width = innerWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's bars come and go
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => applyTheme(THEME.dark), 100);
  });
  let before = false; // paper is light, and narrower than most screens
  addEventListener("beforeprint", () => {
    before = THEME.dark;
    document.body.style.width = "44rem";
    applyTheme(false);
  });
  addEventListener("afterprint", () => {
    document.body.style.width = "";
    applyTheme(before);
  });
}
