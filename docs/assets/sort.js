// A click on a heading sorts a table of the class "sortable" by that column; another click, the other way round.
document.addEventListener("click", event => {
  const heading = event.target.closest("table.sortable th")
  if (!heading) return
  const table = heading.closest("table")
  const column = [...heading.parentNode.children].indexOf(heading)
  const order = heading.getAttribute("aria-sort") === "descending" ? "ascending" : "descending"
  for (const other of heading.parentNode.children) other.removeAttribute("aria-sort")
  heading.setAttribute("aria-sort", order)
  const key = row => {
    const cell = row.children[column]
    const given = cell.dataset.value ?? cell.textContent.trim()
    return given !== "" && !Number.isNaN(Number(given)) ? Number(given) : given
  }
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)))
  const sign = order === "ascending" ? 1 : -1
  const body = table.tBodies[0]
  const empty = row => key(row) === ""
  const rows = [...body.rows].sort((a, b) => empty(a) - empty(b) || sign * compare(key(a), key(b)))
  body.append(...rows)
})
