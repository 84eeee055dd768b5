(() => {
  "use strict";
  const FILTER_FROM = 12;
  const keyOf = (cell) => (cell.dataset.key === undefined ? NaN : Number(cell.dataset.key));

  const compare = (first, second) => {
    const [a, b] = [keyOf(first), keyOf(second)];
    if (!Number.isNaN(a) && !Number.isNaN(b)) return a - b;
    return first.textContent.localeCompare(second.textContent, "en", { numeric: true });
  };

  const sort = (table, column, head) => {
    const largestFirst = head.classList.contains("number");
    const before = head.getAttribute("aria-sort");
    const descending = before ? before === "ascending" : largestFirst;
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => row.cells[column]);
    const filled = rows.filter((cell) => cell.dataset.key !== undefined || cell.textContent.trim());
    const empty = rows.filter((cell) => !filled.includes(cell));
    filled.sort((a, b) => (descending ? compare(b, a) : compare(a, b)));
    body.append(...[...filled, ...empty].map((cell) => cell.parentElement));
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
  };

  const makeSortable = (table) => {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      if (head.tagName !== "TH") return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sort(table, column, head));
      head.append(button);
    });
  };

  const makeFilter = (table) => {
    const scroll = table.parentElement;
    const label = document.createElement("label");
    const field = document.createElement("input");
    const shown = document.createElement("output");
    field.type = "search";
    field.placeholder = "all rows";
    label.className = "filter";
    label.append("Show rows with ", field, shown);
    const rows = [...table.tBodies[0].rows];
    field.addEventListener("input", () => {
      const wanted = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const row of rows) {
        const titles = [...row.querySelectorAll("[title]")].map((cell) => cell.title).join(" ");
        const text = `${row.textContent} ${titles}`.toLowerCase();
        row.hidden = !wanted.every((word) => text.includes(word));
        count += row.hidden ? 0 : 1;
      }
      shown.textContent = wanted.length ? `${count} of ${rows.length}` : "";
    });
    scroll.before(label);
  };

  const makeCopy = (block) => {
    if (!navigator.clipboard) return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "copy";
    button.addEventListener("click", () => {
      navigator.clipboard.writeText(block.textContent).then(() => {
        button.textContent = "copied";
      });
    });
    block.before(button);
  };

  const openTarget = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let place = target; place; place = place.parentElement) {
      if (place.tagName === "DETAILS") place.open = true;
    }
    if (target && target.tagName === "DETAILS") target.querySelector("summary").focus();
  };

  const toggleAll = (button) => {
    const rows = [...document.querySelectorAll(button.dataset.opens)];
    button.hidden = false;
    button.addEventListener("click", () => {
      const open = rows.some((row) => !row.open);
      for (const row of rows) row.open = open;
      button.setAttribute("aria-expanded", String(open));
    });
  };

  for (const table of document.querySelectorAll("table.data")) {
    if (table.tBodies[0].rows.length > 1) makeSortable(table);
    if (table.tBodies[0].rows.length >= FILTER_FROM) makeFilter(table);
  }
  document.querySelectorAll("pre").forEach(makeCopy);
  document.querySelectorAll("button[data-opens]").forEach(toggleAll);
  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const details of opened) details.open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
  });
  window.addEventListener("hashchange", openTarget);
  openTarget();
})();
