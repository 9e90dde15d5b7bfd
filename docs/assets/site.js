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

// The search takes every word as the beginning of others, so that "a" finds "arq". Fillers are left out of a
// question, unless it has no other word.
const FILLERS = new Set(
  ("a an and are as at be by can do for from has have how i if in is it my no not of on or per should that the " +
    "there this to was what when where which who why will with you your").split(" ")
);
const QUERY = 2;  // the kind of message with which the theme asks its worker

function withoutFillers(text) {
  const words = text.split(/\s+/).filter((word) => !FILLERS.has(word.toLowerCase()));
  return words.length ? words.join(" ") : text;
}

const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...others) {
  const isQuery = message && message.type === QUERY && typeof message.data === "string";
  return post.call(this, isQuery ? {...message, data: withoutFillers(message.data)} : message, ...others);
};

// The theme marks the words of ?h= in escaped text. A word that is part of an escaped character, such as the "3"
// of &#39;, would destroy it, so the theme must not see such words.
const ESCAPED = "&amp; &lt; &gt; &quot; &#39;";

function withoutPartsOfEscapes(text) {
  return text.split(/\s+/).filter((word) => !ESCAPED.includes(word.toLowerCase())).join(" ");
}

const opened = new URL(location.href);
const searched = opened.searchParams.get("h");
if (searched) {
  opened.searchParams.set("h", withoutPartsOfEscapes(searched));
  history.replaceState(history.state, "", opened);
}
