// A click on a heading sorts a table within an element of the class "sortable" by that column; another click, the other
// way round. What is typed into a field of the class "filter" leaves the rows that have every word of it.
{
  const value = cell => {
    const words = cell.textContent.trim()
    const number = parseFloat(words)
    return words === "" ? null : Number.isNaN(number) ? words.toLowerCase() : number
  }

  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)))

  document.addEventListener("click", event => {
    const heading = event.target.closest(".sortable th")
    if (!heading) return
    const headings = [...heading.parentNode.children]
    const column = headings.indexOf(heading)
    const order = heading.getAttribute("aria-sort") === "descending" ? "ascending" : "descending"
    for (const other of headings) other.removeAttribute("aria-sort")
    heading.setAttribute("aria-sort", order)
    const sign = order === "ascending" ? 1 : -1
    const body = heading.closest("table").tBodies[0]
    const rows = [...body.rows].map(row => [value(row.children[column]), row])
    rows.sort(([a], [b]) => (a === null) - (b === null) || sign * compare(a, b))
    body.append(...rows.map(([, row]) => row))
  })

  document.addEventListener("input", event => {
    if (!event.target.matches(".filter")) return
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean)
    for (const row of document.querySelectorAll(".sortable.rows tbody tr")) {
      const text = row.textContent.toLowerCase()
      row.hidden = !words.every(word => text.includes(word))
    }
  })
}
