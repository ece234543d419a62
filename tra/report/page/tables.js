// Tables sorted by the buttons in their heads: first click from high to low, then the other way.
function sortableTable(section, table) {
  const body = element("tbody");
  const heads = ["mechanism", ...table.columns].map((name, column) => {
    const head = element("th", { scope: "col" });
    head.append(
      element("button", { type: "button", onclick: () => sort(column, head) }, isolated(shortened(name, 60))),
    );
    return head;
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
  function sort(column, head) {
    const up =
      head.getAttribute("aria-sort") === "descending" ||
      (column === 0 && head.getAttribute("aria-sort") !== "ascending");
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const sorted = [...rows].sort((a, b) => {
      const [x, y] = [a.values[column], b.values[column]];
      if (x === null || y === null) return (x === null) - (y === null); // what wasn't measured stays last
      const order = typeof x === "string" ? x.localeCompare(y) : x - y;
      return up ? order : -order;
    });
    body.append(...sorted.map((row) => row.made));
  }
  body.append(...rows.map((row) => row.made));
  const made = element("table", { "aria-label": table.title }, element("thead", {}, element("tr", {}, ...heads)), body);
  return [
    element("h3", {}, isolated(table.title)),
    element("p", { class: "quiet" }, table.note),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": table.title }, made),
  ];
}
