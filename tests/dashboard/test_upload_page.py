"""Uploads by the page: by choosing and by dropping, sound and bad adapters, lost and repeated ones."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, FilePayload, Locator, Page, Request, Route, expect

from bad_upload import Upload
from bad_uploads import good_upload
from browser import PHONE, Watch, grave_findings, sign_in, watched_page
from fake_engine import demo_ready
from lora_files import config_bytes, q_and_v, tensor, weights_bytes
from manylora_server import ADMIN_KEY, DEMO_ADAPTERS, ManyloraServer

OWNER = "uploader"
"""Other tests count what the other tenants have."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DROP = """files => {
  const transfer = new DataTransfer();
  for (const [name, text] of files) {
    transfer.items.add(new File([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))], name));
  }
  for (const kind of ["dragover", "drop"]) {
    document.querySelector("main").dispatchEvent(
      new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true }));
  }
}"""


@pytest.fixture(scope="module", autouse=True)
def cleared(server: ManyloraServer) -> Iterator[None]:
    """Leave the server as other tests of it expect it."""
    client = server.tenant(OWNER)
    yield
    for adapter in client.get("/v1/adapters?limit=1000").json()["data"]:
        client.delete(f"/v1/adapters/{adapter['name']}")


def small(**fields: Any) -> Upload:
    """A sound adapter, of its own by its fields."""
    return Upload(
        config_bytes(base_model_name_or_path="manylora-demo", **fields),
        good_upload(demo_ready().base).weights,
    )


def payloads(files: Upload, *others: tuple[str, bytes]) -> list[FilePayload]:
    named = ((CONFIG, files.config), (WEIGHTS, files.weights), *others)
    return [
        {"name": name, "mimeType": "application/octet-stream", "buffer": content}
        for name, content in named
    ]


def choose(page: Page, files: Sequence[FilePayload], name: str | None = None) -> Locator:
    """Open the window, choose files, and the window."""
    page.get_by_role("button", name="Upload adapter").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Choose the two files").set_input_files(files)
    if name is not None:
        dialog.get_by_label("Name", exact=True).fill(name)
    return dialog


def send(dialog: Locator) -> None:
    dialog.get_by_role("button", name="Upload", exact=True).click()


def test_an_adapter_is_chosen_sent_called_and_seen_on_the_device(
    page: Page, server: ManyloraServer
) -> None:
    sign_in(page, server.tenants[OWNER], "/adapters")
    dialog = choose(page, payloads(small(lora_alpha=10), ("README.md", b"# Loud")), "chosen")
    expect(dialog.get_by_text("README.md")).to_be_visible()
    dialog.get_by_label("Description (optional)").fill("Shouts")
    send(dialog)
    expect(dialog.get_by_role("heading", name="chosen version 1 is ready")).to_be_visible()
    expect(dialog.get_by_label("How requests name it")).to_have_text('model="chosen"')
    made = server.tenant(OWNER).get("/v1/adapters/chosen").json()
    assert (made["version"], made["description"]) == (1, "Shouts")
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_have_count(0)
    expect(page).to_have_url(re.compile("/adapters$"))
    place = page.locator(f'tr[data-key="{OWNER}/chosen"] [data-residency]')
    expect(place).to_have_text("stored")
    server.ask(OWNER, "chosen", "Where is my order?")
    expect(place).to_have_text("device")  # asked for every 5 s


def test_files_are_dropped_anywhere_by_an_admin_for_a_tenant(
    page: Page, server: ManyloraServer
) -> None:
    sign_in(page, ADMIN_KEY, f"/adapters?tenant={OWNER}")
    expect(page.get_by_role("button", name="Upload adapter")).to_be_visible()
    files = small(lora_alpha=31)
    page.evaluate(
        DROP, [(one["name"], base64.b64encode(one["buffer"]).decode()) for one in payloads(files)]
    )
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_text(WEIGHTS).last).to_be_visible()
    expect(dialog.get_by_label("Tenant")).to_have_value(OWNER)
    dialog.get_by_label("Name", exact=True).fill("dropped")
    send(dialog)
    expect(dialog.get_by_role("heading", name="dropped version 1 is ready")).to_be_visible()
    assert server.tenant(OWNER).get("/v1/adapters/dropped").json()["tenant"] == OWNER
    dialog.get_by_role("link", name="Open it").click()
    expect(page).to_have_url(re.compile(rf"/adapters/dropped\?tenant={OWNER}"))
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_folder_names_the_adapter_and_what_is_deeper_is_left(
    page: Page, server: ManyloraServer, tmp_path: Path
) -> None:
    folder = tmp_path / "My Adapter"
    for place, alpha in ((folder, 21), (folder / "checkpoint-100", 22)):
        place.mkdir()
        (place / CONFIG).write_bytes(small(lora_alpha=alpha).config)
        (place / WEIGHTS).write_bytes(small().weights)
    (folder / "optimizer.pt").write_bytes(b"pickle")
    sign_in(page, server.tenants[OWNER], "/adapters")
    page.get_by_role("button", name="Upload adapter").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Choose a folder").set_input_files(folder)
    expect(dialog.get_by_label("Name", exact=True)).to_have_value("my-adapter")
    expect(dialog.get_by_role("alert")).to_have_count(0)
    expect(dialog.locator("dt", has_text="Not sent")).to_be_visible()
    send(dialog)
    expect(dialog.get_by_role("heading", name="my-adapter version 1 is ready")).to_be_visible()


def test_a_bad_adapter_gets_a_numbered_report_and_is_sent_again_corrected(
    watched: tuple[Page, Watch], server: ManyloraServer
) -> None:
    page, watch = watched
    watch.allowed.add(422)
    tensors = {**q_and_v(demo_ready().base), "base_model.model.lm_head.weight": tensor((8, 64))}
    bad = Upload(config_bytes(use_dora=True, fan_in_fan_out=True), weights_bytes(tensors))
    sign_in(page, server.tenants[OWNER], "/adapters")
    dialog = choose(page, payloads(bad), "corrected")
    send(dialog)
    expect(dialog.get_by_text("3 things are wrong with it. Nothing was stored.")).to_be_visible()
    findings = dialog.locator("ol.findings > li")
    expect(findings).to_have_count(3)
    expect(findings.nth(0)).to_contain_text("Hint: Set it to false for linear layers.")
    expect(findings.nth(1)).to_contain_text("use_dora")
    expect(findings.nth(2)).to_contain_text("base_model.model.lm_head.weight")
    assert server.tenant(OWNER).get("/v1/adapters/corrected").status_code == 404
    dialog.get_by_role("button", name="Change it and send again").click()
    dialog.get_by_label("Choose the two files").set_input_files(payloads(small(lora_alpha=11)))
    expect(dialog.get_by_label("Name", exact=True)).to_have_value("corrected")
    send(dialog)
    expect(dialog.get_by_role("heading", name="corrected version 1 is ready")).to_be_visible()


def test_the_next_version_is_not_current_unless_wished(page: Page, server: ManyloraServer) -> None:
    client = server.tenant(OWNER)
    assert server.upload(client, "canary", DEMO_ADAPTERS / "pirate").status_code == 201
    sign_in(page, server.tenants[OWNER], "/adapters/canary")
    page.get_by_role("link", name="Upload a version").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Name", exact=True)).to_have_value("canary")
    expect(dialog.get_by_text("this becomes its next version, after version 1")).to_be_visible()
    dialog.get_by_label("Choose the two files").set_input_files(payloads(small(lora_alpha=12)))
    dialog.get_by_label(re.compile("^Make it the current version")).uncheck()
    send(dialog)
    expect(dialog.get_by_role("heading", name="canary version 2 is ready")).to_be_visible()
    expect(dialog.get_by_label("How requests name it")).to_have_text('model="canary@2"')
    assert client.get("/v1/adapters/canary").json()["aliases"] == {"default": 1}
    dialog.get_by_role("button", name="Upload another").click()
    dialog.get_by_label("Choose the two files").set_input_files(payloads(small(lora_alpha=12)))
    send(dialog)
    expect(dialog.get_by_role("heading", name="canary has these files already")).to_be_visible()
    assert len(client.get("/v1/adapters/canary/versions").json()["data"]) == 2


@pytest.mark.parametrize(
    ("names", "says", "hint"),
    [
        ([CONFIG, "adapter_model.bin"], "adapter_model.bin is a pickle", "safe_serialization=True"),
        (["adapter.zip"], "adapter.zip is an archive", "Unpack it"),
        ([CONFIG], f"{WEIGHTS} is missing", "Both files are needed"),
        (
            [CONFIG, "a.safetensors", "b.safetensors"],
            "There are 2 files that could be",
            "Choose the one",
        ),
    ],
)
def test_what_no_upload_can_be_is_said_before_it_is_sent(
    page: Page, server: ManyloraServer, names: list[str], says: str, hint: str
) -> None:
    sign_in(page, server.tenants[OWNER], "/adapters")
    dialog = choose(
        page, [{"name": name, "mimeType": "", "buffer": b"{}"} for name in names], "never"
    )
    expect(dialog.get_by_role("alert")).to_contain_text(says)
    expect(dialog.get_by_role("alert")).to_contain_text(hint)
    expect(dialog.get_by_role("button", name="Upload", exact=True)).to_be_disabled()
    dialog.get_by_label("Name", exact=True).fill("Never")
    expect(dialog.get_by_text("Lower-case letters")).to_be_visible()


def test_a_lost_upload_is_sent_again_under_the_same_key(
    watched: tuple[Page, Watch], server: ManyloraServer
) -> None:
    page, watch = watched
    watch.broken = True
    sign_in(page, server.tenants[OWNER], "/adapters")
    keys: list[str] = []

    def lose_the_first(route: Route, request: Request) -> None:
        if request.method != "POST":
            return route.continue_()
        keys.append(request.headers["idempotency-key"])
        return route.abort("connectionreset") if len(keys) == 1 else route.continue_()

    page.route(re.compile("/v1/adapters$"), lose_the_first)
    dialog = choose(page, payloads(small(lora_alpha=13)), "lost")
    send(dialog)
    expect(dialog.get_by_role("heading", name="lost did not arrive")).to_be_visible()
    expect(dialog.get_by_role("alert")).to_contain_text("become one version")
    dialog.get_by_role("button", name="Send it again").click()
    expect(dialog.get_by_role("heading", name="lost version 1 is ready")).to_be_visible()
    assert len(keys) == 2
    assert keys[0] == keys[1]


def test_a_slow_upload_goes_on_in_the_background_and_is_cancelled(
    page: Page, server: ManyloraServer
) -> None:
    sign_in(page, server.tenants[OWNER], "/adapters")
    network = page.context.new_cdp_session(page)
    slow = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 60_000}
    network.send("Network.emulateNetworkConditions", slow)
    french = Upload(*((DEMO_ADAPTERS / "french" / name).read_bytes() for name in (CONFIG, WEIGHTS)))
    dialog = choose(page, payloads(french), "slow")
    send(dialog)
    expect(dialog.get_by_role("progressbar", name="Upload")).to_be_visible()
    expect(dialog.locator("[data-sent]")).to_have_text(
        re.compile(r"of 5\d\d KiB · \d+ KiB/s, about .* left")
    )
    dialog.get_by_role("button", name="Close").last.click()
    strip = page.get_by_role("region", name="Upload")
    expect(strip).to_contain_text("Sending slow")
    page.get_by_role("link", name="Key and limits").click()
    page.go_back()
    strip.get_by_role("button", name="Show").click()
    page.get_by_role("button", name="Cancel the upload").click()
    expect(
        page.get_by_role("dialog").get_by_role("heading", name="Upload an adapter")
    ).to_be_visible()
    network.send("Network.emulateNetworkConditions", {**slow, "uploadThroughput": -1})
    assert server.tenant(OWNER).get("/v1/adapters/slow").status_code == 404


def test_the_window_works_by_keyboard_on_a_phone(browser: Browser, server: ManyloraServer) -> None:
    with watched_page(browser, server.url, size=PHONE, scheme="dark") as (page, _):
        sign_in(page, server.tenants[OWNER], "/adapters")
        page.get_by_role("button", name="Upload adapter").press("Enter")
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Choose the two files").focus()
        dialog.get_by_label("Choose the two files").set_input_files(payloads(small(lora_alpha=14)))
        dialog.get_by_label("Name", exact=True).press_sequentially("by-keys")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("heading", name="by-keys version 1 is ready")).to_be_visible()
        assert grave_findings(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
