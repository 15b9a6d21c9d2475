// A browser does not let a page that was opened from a file read the search index, so the theme hides its search there.
if (location.protocol === "file:") {
  const note = document.createElement("p");
  note.className = "from-file";
  note.textContent = "Search needs a server: make docs-serve";
  document.querySelector(".md-content__inner")?.prepend(note);
}
