// Which groups are shown, in all charts of a section, and the checkboxes that say so.
function mechanismList(section) {
  const state = { shown: section.groups.map(() => true), listeners: [] };
  const boxes = section.groups.map((group, index) =>
    element("input", {
      type: "checkbox",
      onchange: (event) => {
        state.shown[index] = event.target.checked;
        state.changed();
      },
    }),
  );
  state.changed = () => {
    boxes.forEach((box, index) => {
      box.checked = state.shown[index];
    });
    for (const listener of state.listeners) listener();
  };
  state.set = (wish) => {
    state.shown = section.groups.map((_, index) => wish(index));
    state.changed();
  };
  state.toggle = (index) => {
    state.shown[index] = !state.shown[index];
    state.changed();
  };
  state.only = (index) =>
    state.set((other) => other === index || (state.shown[index] && state.shown.filter(Boolean).length === 1));
  const choices = element("div", { class: "choices" });
  section.groups.forEach((group, index) => {
    boxes[index].checked = true;
    const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
    const paint = () => {
      swatch.style.background = rgb(tinted(group.colour));
    };
    paint();
    redraws.push(paint);
    choices.append(
      element(
        "label",
        { title: group.label.length > 40 ? group.label.slice(0, 500) : null },
        boxes[index],
        swatch,
        isolated(shortened(group.label, 40)),
      ),
    );
  });
  if (section.groups.length > 2) {
    choices.append(element("button", { type: "button", onclick: () => state.set(() => true) }, "All"));
    choices.append(element("button", { type: "button", onclick: () => state.set(() => false) }, "None"));
  }
  return {
    state,
    list: element("fieldset", { class: "mechanisms" }, element("legend", {}, "Mechanisms in the charts"), choices),
  };
}
