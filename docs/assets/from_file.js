// A browser does not let a page that was opened from a file read the search index.
if (location.protocol === "file:") {
  const input = document.querySelector(".md-search__input");
  if (input) {
    input.placeholder = "Search needs a server: make docs-serve";
    input.disabled = true;
  }
}
