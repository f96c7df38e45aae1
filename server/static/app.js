// The frame around all pages: the menu, who is signed in, and the page itself.
import { html, render, useEffect, useState } from "./lib.js";
import { me } from "./api.js";
import { Link, place } from "./place.js";
import { SignInPage, TenantChoice, findOut, isAdmin, may, meProblem, signOut } from "./session.js";
import { Button, Card, Empty, LacksScope, Notes, OpenDialog, Problem, Skeleton } from "./ui.js";

/** Pages are loaded when they are first shown. `admin` keeps tenants out; `own` is for tenants only; `scope` is what
 * a key needs to see the page; `tenant` offers the choice of one. `part` is what the module calls the page, if not its default. */
const PAGES = [
  { path: "/", label: "Overview", load: () => import("./pages/overview.js"), tenant: true, scope: "usage" },
  { path: "/usage", label: "Usage", load: () => import("./pages/usage.js"), tenant: true, scope: "usage" },
  { path: "/adapters", label: "Adapters", load: () => import("./pages/adapters.js"), tenant: true },
  { path: "/adapters/:name", load: () => import("./pages/adapter.js"), tenant: true },
  { path: "/live", label: "Live", load: () => import("./pages/live.js"), admin: true },
  { path: "/playground", label: "Playground", load: () => import("./pages/playground.js"), tenant: true, scope: "infer" },
  { path: "/tenants", label: "Tenants", load: () => import("./pages/tenants.js"), admin: true },
  { path: "/tenants/:name", load: () => import("./pages/tenants.js"), part: "Tenant", admin: true },
  { path: "/account", label: "Key and limits", load: () => import("./pages/tenants.js"), part: "Account", own: true },
  { path: "/audit", label: "Audit log", load: () => import("./pages/audit.js"), admin: true },
];

function pageAt(path) {
  for (const page of PAGES) {
    const found = path.match(new RegExp(`^${page.path.replace(":name", "([^/]+)")}$`));
    if (found) return { page, name: found[1] === undefined ? undefined : decoded(found[1]) };
  }
  return null;
}

/** A part of the path as it was meant; one that is badly written stays as it is, and names nothing. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function App() {
  useEffect(() => {
    pageAt(place.value.path)?.page.load().catch(() => {}); // loads while the session is looked up; `Shown` asks again
    findOut();
  }, []);
  if (me.value === undefined) return html`<main class="sign-in" aria-busy="true" />`;
  if (me.value === null) {
    return meProblem.value && meProblem.value.status !== 401
      ? html`<main class="sign-in"><${Problem} error=${meProblem.value} retry=${() => location.reload()} /></main>`
      : html`<${SignInPage} />`;
  }
  const here = pageAt(place.value.path);
  return html`<a class="skip" href="#main">Skip to the page</a>
    <div class="frame">
      <${Side} here=${here} />
      <main id="main" tabindex="-1">${here ? html`<${Shown} key=${here.page.path} ...${here} />` : html`<${Empty} title="There is no such page."><${Link} to="/">To the overview<//><//>`}</main>
    </div>
    <${OpenDialog} path=${place.value.path} />
    <${Notes} />`;
}

function Side({ here }) {
  const [isOpen, setOpen] = useState(false);
  useEffect(() => setOpen(false), [place.value.path]);
  const shown = PAGES.filter((page) => page.label && (page.own ? !isAdmin() : !page.admin || isAdmin()));
  const isHere = (page) => here && (here.page.path === page.path || here.page.path === `${page.path}/:name`);
  return html`<header class="side">
    <div class="brand">
      <${Link} to="/" class="brand-link"><img src="/static/manylora.svg" alt="" width="28" height="28" /> Manylora<//>
      <button type="button" class="icon-button menu-button" aria-expanded=${isOpen} aria-controls="menu" aria-label="Menu" onClick=${() => setOpen(!isOpen)}>☰</button>
    </div>
    <div id="menu" class=${isOpen ? "menu open" : "menu"}>
      <nav aria-label="Pages">
        ${shown.map((page) => html`<${Link} to=${page.path} aria-current=${isHere(page) ? "page" : undefined}>${page.label}<//>`)}
      </nav>
      <div class="who">
        ${here?.page.tenant && isAdmin() && html`<${TenantChoice} />`}
        <p><strong>${me.value.tenant?.name ?? "Admin"}</strong><br />
          <span class="quiet">${me.value.key ? me.value.key.name ?? me.value.key.prefix : isAdmin() ? "sees every tenant" : ""}</span></p>
        <${Button} kind="small" onClick=${signOut}>Sign out<//>
      </div>
    </div>
  </header>`;
}

function Shown({ page, name }) {
  const [Page, setPage] = useState(null);
  const [error, setError] = useState(null);
  const isForOthers = page.admin && !isAdmin();
  const isClosed = isForOthers || (page.scope && !may(page.scope));
  useEffect(() => {
    document.title = `${name ?? page.label} · Manylora`;
    if (isClosed) return;
    page.load().then(
      (module) => setPage(() => module[page.part ?? "default"]),
      () => setError({ message: "This page could not be loaded: the server does not answer. Try again when it runs.", code: "unreachable" }),
    );
  }, [page, name, isClosed]);
  if (isForOthers) return html`<h1>${page.label}</h1><${Card}><${Empty} title="This page is for admins.">To see it, sign out and sign in with the admin key.<//><//>`;
  if (isClosed) return html`<h1>${page.label}</h1><${LacksScope} scope=${page.scope} />`;
  if (error) return html`<h1>${name ?? page.label}</h1><${Problem} error=${error} retry=${() => location.reload()} />`;
  return Page ? html`<${Page} name=${name} />` : html`<${Skeleton} />`;
}

render(html`<${App} />`, document.getElementById("app"));
