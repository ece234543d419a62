// The page, from its data: what could not be read, then a section per task.
// Paragraphs with their lists.
function proseOf(paragraphs) {
  const list = (items) => element("ul", {}, ...items.map((item) => element("li", {}, isolated(item))));
  const parts = paragraphs.flatMap(({ text, items }) => [
    element("p", {}, isolated(text)),
    ...(items.length ? [list(items)] : []),
  ]);
  return element("div", { class: "summary prose" }, ...parts);
}

function chartsPart(section, state, draws) {
  const made = [];
  section.charts.forEach((chart, index) => {
    if (index === 1) made.push(proseOf(section.summary.slice(1)), mechanismList(section, state));
    const views = chart.kind === "failures" && chart.measures.length > 1 ? [0, 1] : [0];
    const drawn = views.map((first) => chartFigure(section, chart, state, first, index === 0));
    draws.push(...drawn.map((each) => each.draw));
    const title = element("h3", {}, isolated(chart.title));
    const figures = drawn.map((each) => each.figure);
    if (chart.kind !== "perplexity" || index === 0) {
      made.push(title, sideBySide(figures));
      return;
    }
    if (!made.at(-1).classList.contains("texts")) made.push(element("div", { class: "pair two texts" })); // side by side
    made.at(-1).append(element("div", {}, title, ...figures));
  });
  if (section.charts.length < 2) made.push(proseOf(section.summary.slice(1)), mechanismList(section, state));
  return made;
}

function mapsPart(section, draws) {
  if (!section.maps.length) return [];
  const panels = section.maps.slice(0, 2).map((_, index) => mapPanel(section, index));
  draws.push(...panels.map((panel) => panel.draw));
  const note = "Shown first is the head with the largest weights on single keys further back. A cell is the weight that a query (row) gives a key (column). Bare ground: dropped, or not seen.";
  const figures = sideBySide(panels.map((panel) => panel.figure));
  return [element("h3", {}, "Attention maps"), quiet(`${note} ${DATA.maps_note}`), figures];
}

function runsPart(section) {
  const commands = [...new Set(section.runs.flatMap((run) => run.commands))].join("\n");
  const listing = element("pre", { tabindex: "0", "aria-label": "Commands" }, commands);
  const runs = section.runs.map((run) => {
    const facts = [["folder", run.name], ...run.facts, ["command", run.commands.join("; ")]]
      .filter(([, value]) => value)
      .flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, isolated(value))]);
    const file = (name, text) => folded(name, element("pre", { dir: "auto" }, text));
    const files = [file("config.json", run.config), file("environment.json", run.environment)];
    return folded(shortened(run.label, 80), element("dl", {}, ...facts), ...files);
  });
  return [
    element("h3", {}, "Runs, and how to make them again"),
    commands ? listing : quiet("The runs don't say how they were made."),
    ...(runs.length > 6 ? [folded(`Configs and environments of ${runs.length} runs`, ...runs)] : runs),
  ];
}

function problemsPart() {
  const lines = DATA.problems.map((problem) =>
    element("li", {}, isolated(shortened(problem.run, 200)), " ", isolated(problem.why)),
  );
  const title = DATA.problems.some((problem) => problem.whole) ? "Not shown" : "Shown in part";
  return element("div", { class: "problems", role: "note" }, element("h2", {}, title), element("ul", {}, ...lines));
}

function sectionPart(section, id, draws) {
  const state = shownGroups(section);
  return element(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    element("h2", { id: `${id}-title` }, isolated(shortened(section.title, 200))),
    proseOf(section.summary.slice(0, 1)),
    ...chartsPart(section, state, draws),
    ...section.tables.flatMap((table) => sortableTable(section, table)),
    ...mapsPart(section, draws),
    ...runsPart(section),
  );
}

// Builds all words and tables, and returns the functions that draw the charts.
function build() {
  const title = shortened(DATA.title, 80);
  document.title = `tra report: ${title}`;
  document.querySelector("h1").replaceChildren("tra report: ", isolated(title));
  document.getElementById("count").textContent = `${DATA.count}. tra ${DATA.version}.`;
  document.getElementById("made").append(folded("How to make this page again", element("pre", {}, DATA.command)));
  const main = document.getElementById("content");
  if (DATA.problems.length) main.append(problemsPart());
  const draws = [];
  main.append(...DATA.sections.map((section, index) => sectionPart(section, `task-${index}`, draws)));
  const links = DATA.sections.map((section, index) =>
    element("li", {}, element("a", { href: `#task-${index}` }, isolated(shortened(section.title, 80)))),
  );
  if (links.length > 1) document.getElementById("contents").append(element("ul", {}, ...links));
  return draws;
}

const draws = build();
const early = redraws.splice(0); // nothing is drawn again before it was drawn
watchTheme();
// Words and tables stand before Plotly's script is read. Then one chart at a time: the page can be scrolled meanwhile.
function drawNext() {
  const draw = draws.shift();
  if (draw) {
    draw();
    setTimeout(drawNext);
  } else {
    redraws.push(...early);
    document.documentElement.dataset.ready = "yes";
  }
}
document.addEventListener("DOMContentLoaded", () => setTimeout(drawNext));
