// A saved answer: drawn once, without controls.
"use strict";

document.querySelector(".actions").remove();
document.querySelector(".board").classList.add("alone");
// What `wayButton` would fill is in the actions, so an answer is drawn with an empty place for it.
document.querySelector("main").append(charts.element("span", { id: "ways", hidden: "" }));
answerView().draw(JSON.parse(document.getElementById("planner-data").textContent).saved);
