/** Light or dark: as the system has it until somebody presses the button, and then as they chose. */

const KEY = "guerdon-theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");

function chosen() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage may be forbidden; the choice then lasts as long as the page
  }
}

/** Whether the page is dark now. */
function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : system.matches;
}

/** Makes the button change the theme. */
export function start(button) {
  const show = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to the ${isDark() ? "light" : "dark"} theme`);
  };
  const theme = chosen();
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  button.addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // as above
    }
    show();
  });
  system.addEventListener("change", show);
  show();
}
