// The libraries under the names that all modules here use.
import { h, render } from "./vendor/preact.js";
import { useCallback, useEffect, useId, useMemo, useRef, useState } from "./vendor/hooks.js";
import { signal } from "./vendor/signals.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { render, signal };
export { useCallback, useEffect, useId, useMemo, useRef, useState };
