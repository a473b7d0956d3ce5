"use strict";

(() => {
  const NEAR = 18; // pixels: the pointer selects a point of a figure within this distance

  const every = (selector, root = document) => [...root.querySelectorAll(selector)];

  /* One tooltip for all elements with data-tip: under the pointer, under a finger, or in focus. */

  const tooltip = document.getElementById("tooltip");

  const centre = (element) => {
    const box = element.getBoundingClientRect();
    return { x: box.left + box.width / 2, y: box.top + box.height / 2 };
  };

  const nearestDot = (drawing, x, y) => {
    let best = null;
    let least = NEAR;
    for (const dot of every(".dot", drawing)) {
      const at = centre(dot);
      const distance = Math.hypot(at.x - x, at.y - y);
      if (distance < least) [best, least] = [dot, distance];
    }
    return best;
  };

  const elementWithTip = (target, x, y) => {
    if (!(target instanceof Element)) return null;
    const drawing = target.closest(".drawing");
    return target.closest("[data-tip]") ?? (drawing && nearestDot(drawing, x, y));
  };

  const channelUnder = (element, target, x) => {
    const strip = element.closest(".strip svg");
    if (!strip || target === element) return "";
    const box = strip.getBoundingClientRect();
    const width = Number(strip.dataset.width);
    const channel = Math.min(width - 1, Math.max(0, Math.floor(((x - box.left) / box.width) * width)));
    return `\nchannel ${channel}: ${target.tagName === "path" ? "kept" : "removed"}`;
  };

  const place = (x, y) => {
    const box = tooltip.getBoundingClientRect();
    const right = document.documentElement.clientWidth - box.width - 8;
    const above = y - box.height - 12;
    tooltip.style.left = `${Math.max(8, Math.min(x + 12, right))}px`;
    tooltip.style.top = `${above < 8 ? y + 18 : above}px`;
  };

  const light = (element, on) => {
    if (element.classList.contains("dot")) {
      element.classList.toggle("lit", on);
      every(`tr[data-point="${element.id}"]`).forEach((row) => row.classList.toggle("lit", on));
    }
  };

  let shown = null;

  const hide = () => {
    if (shown) light(shown, false);
    shown = null;
    tooltip.hidden = true;
  };

  const show = (element, x, y, more = "") => {
    if (shown !== element) hide();
    shown = element;
    tooltip.textContent = element.dataset.tip + more;
    tooltip.hidden = false;
    light(element, true);
    place(x, y);
  };

  const follow = (event) => {
    const element = elementWithTip(event.target, event.clientX, event.clientY);
    if (element) show(element, event.clientX, event.clientY, channelUnder(element, event.target, event.clientX));
    else hide();
  };

  document.addEventListener("pointermove", (event) => event.pointerType !== "touch" && follow(event));
  document.addEventListener("click", follow);
  document.addEventListener("focusin", (event) => {
    if (event.target.dataset?.tip && event.target.matches(":focus-visible")) {
      const { x, y } = centre(event.target);
      show(event.target, x, y);
    }
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  document.addEventListener("scroll", () => {
    if (!shown || shown.matches(":hover")) return;
    if (shown !== document.activeElement) return hide();
    const { x, y } = centre(shown);
    place(x, y);
  }, { passive: true, capture: true });

  for (const element of every("[data-tip]:not([aria-label])")) {
    element.setAttribute("aria-label", element.dataset.tip.replaceAll("\n", ", "));
  }

  /* The tab key stops once at each map; arrow keys move within it. */

  const neighbours = (rows, step) => {
    for (const [y, row] of rows.entries()) {
      const x = row.indexOf(document.activeElement);
      if (x >= 0) return rows[y + step[1]]?.[x + step[0]];
    }
    return null;
  };

  const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

  const roam = (root, rows) => {
    if (rows.length) rows[0][0].tabIndex = 0;
    root.addEventListener("keydown", (event) => {
      const next = STEPS[event.key] && neighbours(rows, STEPS[event.key]);
      if (!next) return;
      event.preventDefault();
      document.activeElement.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  };

  every(".heat").forEach((map) => roam(map, every("tbody tr", map).map((row) => every("td", row))));
  every(".strip svg").forEach((strip) => roam(strip, every("g", strip).map((head) => [head])));

  /* Press a header to sort a table by that column; unknown values stay last. */

  const keyOf = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.value ?? cell.textContent.trim();
    return text === "" || text === "–" ? null : text;
  };

  const compare = (a, b) => {
    const [x, y] = [Number(a), Number(b)];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, undefined, { numeric: true }) : x - y;
  };

  const sort = (table, header) => {
    const sign = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => ({ row, key: keyOf(row, header.cellIndex) }));
    rows.sort((a, b) => {
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
      return sign * compare(a.key, b.key);
    });
    every("th[aria-sort]", table).forEach((other) => other.setAttribute("aria-sort", "none"));
    header.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    body.append(...rows.map(({ row }) => row));
  };

  for (const table of every("table.sortable")) {
    for (const header of every("th[aria-sort]", table)) {
      const numeric = [...table.tBodies[0].rows].some((row) => row.cells[header.cellIndex].className === "number");
      header.classList.toggle("number", numeric);
      header.querySelector("button").addEventListener("click", () => sort(table, header));
    }
    for (const row of every("tr[data-point]", table)) {
      const dot = document.getElementById(row.dataset.point);
      row.addEventListener("pointerenter", () => dot?.classList.add("lit"));
      row.addEventListener("pointerleave", () => dot?.classList.remove("lit"));
    }
  }

  /* Copy with or without permission for the clipboard; where both fail, select the text. */

  const select = (element) => {
    const range = document.createRange();
    range.selectNodeContents(element);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
  };

  const copy = async (code) => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      return "Copied";
    } catch {
      select(code);
      return document.execCommand("copy") ? "Copied" : "Selected";
    }
  };

  for (const button of every(".copy")) {
    button.addEventListener("click", async () => {
      button.textContent = await copy(button.parentElement.querySelector("code"));
      setTimeout(() => (button.textContent = "Copy"), 1600);
    });
  }

  /* The table of contents marks the current section. */

  const links = new Map(every(".toc a").map((link) => [link.hash.slice(1), link]));
  const inView = new Set();
  const watch = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) inView[isIntersecting ? "add" : "delete"](target.id);
      const current = [...links.keys()].find((id) => inView.has(id));
      for (const [id, link] of links) {
        if (id === current) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    },
    { rootMargin: "-15% 0px -60% 0px" },
  );
  for (const id of links.keys()) watch.observe(document.getElementById(id));

  /* Boxes that scroll sideways can be reached by the keyboard, and folded parts open for printing. */

  for (const box of every(".scroll")) if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  window.addEventListener("beforeprint", () => every("details").forEach((details) => (details.open = true)));
})();
