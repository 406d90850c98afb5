-- index.qmd includes README.md, whose own title is there for GitHub: drop level-1 headings that are not {.unnumbered}
function Header(h)
  if h.level == 1 and not h.classes:includes("unnumbered") then return {} end
end
