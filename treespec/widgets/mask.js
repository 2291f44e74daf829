// Lights a node's row in the mask and its path in the tree. Both pictures come from Python, escaped; nothing is drawn here.
const KEYS = {
  ArrowDown: (at, n) => Math.min(at + 1, n - 1),
  ArrowUp: (at) => Math.max(at - 1, 0),
  ArrowLeft: (at, n, parent) => (at > 0 ? parent[at] : 0),
  ArrowRight: (at, n, parent) => {
    const child = parent.indexOf(at, at + 1);
    return child < 0 ? at : child;
  },
  Home: () => 0,
  End: (at, n) => n - 1,
  Escape: () => -1,
};

function render({ model, el }) {
  el.classList.add("treespec-mask");
  el.innerHTML = `
    <div class="question">Which token may look at which?</div>
    <div class="pictures" tabindex="0" role="application"
         aria-label="Token tree and attention mask. Arrow keys choose a node, Escape none.">
      <div class="picture tree"></div><div class="picture rows"></div>
    </div>
    <div class="said" role="status" aria-live="polite"></div>`;
  const pictures = el.querySelector(".pictures");
  const said = el.querySelector(".said");
  const hint = "Point at a node or a row, or press Tab and the arrow keys: down and up through the nodes, left to the parent, right to the first child.";
  let nodes = [];
  let rows = [];
  let hovered = -1;

  const light = () => {
    const node = hovered >= 0 ? hovered : model.get("selected");
    const parent = model.get("parent");
    const path = new Set();
    for (let i = node; i >= 0; i = parent[i]) path.add(i);
    nodes.forEach((mark, i) => {
      mark.classList.toggle("lit", i === node);
      mark.classList.toggle("seen", i !== node && path.has(i));
      mark.classList.toggle("dim", node >= 0 && !path.has(i));
    });
    rows.forEach((row, i) => {
      row.classList.toggle("lit", i === node);
      row.classList.toggle("seen", i !== node && path.has(i));
    });
    const column = el.querySelector(".column");
    if (column) {
      column.classList.toggle("lit", node >= 0);
      column.setAttribute("transform", `translate(${Math.max(node, 0) * column.dataset.step} 0)`);
    }
    said.textContent = node >= 0 ? model.get("said")[node] : hint;
  };
  const choose = (node) => {
    model.set("selected", node);
    model.save_changes();
    light();
  };
  const watch = (marks) =>
    marks.forEach((mark, i) => {
      mark.addEventListener("pointerenter", () => { hovered = i; light(); });
      mark.addEventListener("pointerleave", () => { hovered = -1; light(); });
      mark.addEventListener("click", () => choose(model.get("selected") === i ? -1 : i));
    });
  const draw = () => {
    el.querySelector(".tree").innerHTML = model.get("tree");
    el.querySelector(".rows").innerHTML = model.get("mask");
    nodes = [...el.querySelectorAll(".tree svg > g")].slice(0, model.get("parent").length);
    rows = [...el.querySelectorAll(".rows svg > g.row")];
    watch(nodes);
    watch(rows);
    light();
  };
  pictures.addEventListener("keydown", (event) => {
    const move = KEYS[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation(); // JupyterLab has arrow keys of its own
    hovered = -1;
    choose(move(model.get("selected"), nodes.length, model.get("parent")));
  });
  model.on("change:tree change:mask", draw);
  model.on("change:selected", light);
  draw();
  return () => {
    model.off("change:tree change:mask", draw);
    model.off("change:selected", light);
  };
}

export default { render };
