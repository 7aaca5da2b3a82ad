import { $ } from "../common/dom.js";
import { themeButton } from "../common/theme.js";

themeButton($("#theme"));
