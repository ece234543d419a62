// The page, from its data: what couldn't be shown, then a section per task.
function summaryPart(section) {
  const made = element("div", { class: "summary prose" });
  for (const paragraph of section.summary) {
    made.append(element("p", {}, isolated(paragraph.text)));
    if (paragraph.items.length)
      made.append(element("ul", {}, ...paragraph.items.map((item) => element("li", {}, isolated(item)))));
  }
  return made;
}

function folded(title, ...children) {
  return element("details", {}, element("summary", {}, isolated(title)), element("div", {}, ...children));
}

function runsPart(section) {
  const made = [element("h3", {}, "Runs, and how to make them again")];
  const commands = [...new Set(section.runs.flatMap((run) => run.commands))];
  made.push(
    commands.length
      ? element("pre", { tabindex: "0", "aria-label": "Commands" }, commands.join("\n"))
      : element("p", { class: "quiet" }, "The runs don't say how they were made."),
  );
  const runs = section.runs.map((run) => {
    const facts = element("dl");
    for (const [name, value] of [["folder", run.name], ...run.facts, ["command", run.commands.join("; ")]]) {
      if (value) facts.append(element("dt", {}, name), element("dd", {}, isolated(value)));
    }
    const config = folded("config.json", element("pre", { dir: "auto" }, run.config));
    const environment = folded("environment.json", element("pre", { dir: "auto" }, run.environment));
    return folded(shortened(run.label, 80), facts, config, environment);
  });
  return [...made, ...(runs.length > 6 ? [folded(`Configs and environments of ${runs.length} runs`, ...runs)] : runs)];
}

function chartsPart(section, state, draws) {
  const made = [];
  section.charts.forEach((chart, index) => {
    const views = chart.kind === "failures" && chart.measures.length > 1 ? [0, 1] : [0];
    const figures = views.map((first) => chartFigure(section, chart, state, first, index === 0));
    draws.push(...figures.map((each) => each.draw));
    const title = element("h3", {}, isolated(chart.title));
    if (chart.kind === "perplexity" && index > 0) {
      // texts after the first stand side by side
      if (index === 1) made.push(element("div", { class: "pair two" }));
      made.at(-1).append(element("div", {}, title, figures[0].figure));
      return;
    }
    made.push(
      title,
      element("div", { class: views.length > 1 ? "pair two" : "pair" }, ...figures.map((each) => each.figure)),
    );
  });
  return made;
}

function mapsPart(section, draws) {
  if (!section.maps.length) return [];
  const panels = section.maps.slice(0, 2).map((_, index) => mapPanel(section, index));
  draws.push(...panels.map((panel) => panel.draw));
  const note = "A cell is the weight that a query (row) gives a key (column). Bare ground: dropped, or not seen.";
  return [
    element("h3", {}, "Attention maps"),
    element("p", { class: "quiet" }, `${note} ${DATA.maps_note}`),
    element("div", { class: panels.length > 1 ? "pair two" : "pair" }, ...panels.map((panel) => panel.figure)),
  ];
}

function problemsPart() {
  const lines = DATA.problems.map((problem) =>
    element("li", {}, isolated(shortened(problem.run, 200)), " ", isolated(problem.why)),
  );
  const whole = DATA.problems.some((problem) => problem.whole);
  return element(
    "div",
    { class: "problems", role: "note" },
    element("h2", {}, whole ? "Not shown" : "Shown in part"),
    element("ul", {}, ...lines),
  );
}

function build() {
  document.title = `tra report: ${shortened(DATA.title, 80)}`;
  document.querySelector("h1").replaceChildren("tra report: ", isolated(shortened(DATA.title, 80)));
  document.getElementById("count").textContent = `${DATA.count}. tra ${DATA.version}.`;
  document.getElementById("made").append(folded("How to make this page again", element("pre", {}, DATA.command)));
  const main = document.getElementById("content");
  if (DATA.problems.length) main.append(problemsPart());
  const links = element("ul");
  const draws = [];
  DATA.sections.forEach((section, index) => {
    const id = `task-${index}`;
    links.append(element("li", {}, element("a", { href: `#${id}` }, isolated(shortened(section.title, 80)))));
    const { state, list } = mechanismList(section);
    main.append(
      element(
        "section",
        { id, "aria-labelledby": `${id}-title` },
        element("h2", { id: `${id}-title` }, isolated(shortened(section.title, 200))),
        summaryPart(section),
        list,
        ...chartsPart(section, state, draws),
        ...section.tables.flatMap((table) => sortableTable(section, table)),
        ...mapsPart(section, draws),
        ...runsPart(section),
      ),
    );
  });
  if (DATA.sections.length > 1) document.getElementById("contents").append(links);
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
