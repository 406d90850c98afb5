-- index.qmd includes README.md, which is written for GitHub. Two things differ in the book:
-- its own title: drop level-1 headings that are not {.unnumbered}
function Header(h)
  if h.level == 1 and not h.classes:includes("unnumbered") then return {} end
end

-- its ```mermaid fence (GitHub draws only this form, Quarto only ```{mermaid}): draw it in the browser
function CodeBlock(b)
  if b.classes:includes("mermaid") then
    local text = b.text:gsub("&", "&amp;"):gsub("<", "&lt;")
    return pandoc.RawBlock("html", '<pre class="mermaid">\n' .. text .. '\n</pre>\n<script type="module">\n' ..
      'import mermaid from "https://cdn.jsdelivr.net/npm/mermaid@11/dist/mermaid.esm.min.mjs";\nmermaid.run();\n</script>')
  end
end
