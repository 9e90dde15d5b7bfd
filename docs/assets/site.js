// The copy button takes the commands of a console block: no prompts, no output.
function commandsOf(text) {
  const commands = [];
  let continues = false;
  for (const line of text.split("\n")) {
    if (line.startsWith("$ ")) {
      commands.push(line.slice(2));
      continues = line.endsWith("\\");
    } else if (continues) {
      commands.push(line.replace(/^> /, ""));
      continues = line.endsWith("\\");
    }
  }
  return commands.join("\n") + "\n";
}

// Before the theme's own listener, which copies this attribute if a button has it.
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-clipboard-target]");
  const block = button && button.closest(".language-console");
  if (!block) return;
  const text = block.querySelector("code").innerText;
  if (/^\$ /m.test(text)) button.setAttribute("data-clipboard-text", commandsOf(text));
}, true);
