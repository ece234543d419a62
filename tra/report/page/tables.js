// Tables sorted by the buttons in their heads: numbers first from high to low, names from A to Z, then the other way.
function sortableTable(section, table) {
  const body = element("tbody");
  const heads = ["mechanism", ...table.columns].map((name, column) => {
    const button = element("button", { type: "button", onclick: () => sort(column) }, isolated(shortened(name, 60)));
    return element("th", { scope: "col" }, button);
  });
  const rows = table.rows.map((row) => {
    const label = section.groups[row.group].label;
    const cells = row.cells.map((cell) => {
      const [mean, rest] = cell.text.split(/ (.*)/s);
      return element("td", {}, mean, ...(rest ? [" ", element("small", {}, rest)] : []));
    });
    const name = element("th", { scope: "row" }, isolated(shortened(label, 60)));
    return { made: element("tr", {}, name, ...cells), values: [label, ...row.cells.map((cell) => cell.value)] };
  });
  function sort(column) {
    const before = heads[column].getAttribute("aria-sort");
    const up = before === "descending" || (column === 0 && before !== "ascending");
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", up ? "ascending" : "descending");
    rows.sort((a, b) => {
      const [x, y] = [a.values[column], b.values[column]];
      if (x === null || y === null) return (x === null) - (y === null); // what wasn't measured stays last
      const order = typeof x === "string" ? x.localeCompare(y) : x - y;
      return up ? order : -order;
    });
    body.append(...rows.map((row) => row.made));
  }
  body.append(...rows.map((row) => row.made));
  const made = element("table", { "aria-label": table.title }, element("thead", {}, element("tr", {}, ...heads)), body);
  const scroll = { class: "scroll", tabindex: "0", role: "region", "aria-label": table.title };
  return [element("h3", {}, isolated(table.title)), quiet(table.note), element("div", scroll, made)];
}
