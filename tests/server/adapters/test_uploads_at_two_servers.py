"""Uploads in pieces at two servers over one database and one blob store, a shared folder or S3."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from api_adapters import sound
from api_server import Api, Client
from api_server import api as open_api
from manylora.errors import ConflictError
from manylora.server.serve import sweeper_of
from manylora.server.uploads import staged_files
from manylora.server.uploads.staged_files import PieceFolder, StagedFiles
from piecewise_client import CONFIG, WEIGHTS, announce, code, complete, put, send_all
from postgres_server import KINDS, database_of
from s3_server import S3Server

pytestmark = pytest.mark.anyio
GOOD = sound()
SIZE = len(GOOD.weights)
HALF = SIZE // 2
UPLOAD = "upl_" + "0" * 26


class Two:
    """Two servers, a client of each for the same tenant, and what lies staged."""

    def __init__(
        self, apis: tuple[Api, Api], clients: tuple[Client, Client], place: Path | str, s3: S3Server
    ) -> None:
        self.apis, self.clients, self._place, self._s3 = apis, clients, place, s3

    def staged(self) -> list[str]:
        if isinstance(self._place, Path):
            return sorted(
                str(path) for path in (self._place / "uploads").rglob("*") if path.is_file()
            )
        return [key for key in self._s3.keys(self._place) if "/uploads/" in key]

    async def received(self, upload_id: str, server: int) -> int:
        view = (await self.clients[server].get(f"/v1/uploads/{upload_id}")).json()
        return int(view["files"][WEIGHTS]["received"])


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, bucket: str) -> Path | str:
    return tmp_path / "shared" if request.param == "folder" else bucket


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return database_of(request.param) or f"sqlite:///{tmp_path}/registry.sqlite"


@pytest.fixture
async def two(
    tmp_path: Path, place: Path | str, database_url: str, s3: S3Server
) -> AsyncIterator[Two]:
    blob_url = str(place) if isinstance(place, Path) else f"s3://{place}/manylora"

    for name in ("a", "b"):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data" / "pepper").write_text("ab" * 32)
    async with (
        open_api(tmp_path / "a", blob_url=blob_url, database_url=database_url) as one,
        open_api(tmp_path / "b", blob_url=blob_url, database_url=database_url) as other,
    ):
        key = await one.key("acme")
        yield Two((one, other), (one.client(key), other.client(key)), place, s3)


async def test_an_upload_goes_on_at_another_server_and_ends_at_the_first(two: Two) -> None:
    one, other = two.clients
    upload_id = (await announce(one, GOOD)).json()["id"]
    await put(one, upload_id, CONFIG, GOOD.config)
    first = await put(one, upload_id, WEIGHTS, GOOD.weights[:HALF], 0, SIZE)
    assert first.json()["files"][WEIGHTS]["received"] == await two.received(upload_id, 1) == HALF
    assert code(await put(other, upload_id, WEIGHTS, GOOD.weights[:HALF], 0, SIZE)) == (
        409,
        "upload.offset_mismatch",
    )
    assert code(await complete(other, upload_id)) == (409, "upload.incomplete")
    rest = await put(other, upload_id, WEIGHTS, GOOD.weights[HALF:], HALF, SIZE)
    assert rest.json()["missing"] == []
    done = await complete(one, upload_id)
    assert done.status_code == 201, done.text
    assert two.staged() == []
    again = await complete(other, upload_id)
    assert (again.status_code, again.content) == (200, done.content)


async def test_a_cut_at_one_server_keeps_what_came_for_the_other(two: Two) -> None:
    one, other = two.clients
    upload_id = (await announce(one, GOOD)).json()["id"]

    async def breaking() -> AsyncIterator[bytes]:
        yield GOOD.weights[:HALF]
        raise ConnectionError

    cut = await one.put(f"/v1/uploads/{upload_id}/files/{WEIGHTS}", content=breaking())
    assert cut.status_code == 500  # this transport has no other way to break off
    assert await two.received(upload_id, 1) == HALF
    await put(other, upload_id, WEIGHTS, GOOD.weights[HALF:], HALF, SIZE)
    await put(other, upload_id, CONFIG, GOOD.config)
    assert (await complete(other, upload_id)).status_code == 201


async def test_bytes_that_only_one_server_spoilt_are_refused_and_due_again_at_both(
    two: Two,
) -> None:
    one, other = two.clients
    upload_id = await send_all(one, GOOD)
    await put(one, upload_id, WEIGHTS, GOOD.weights[:HALF])
    spoilt = bytes(byte ^ 1 for byte in GOOD.weights[HALF:])
    assert (await put(other, upload_id, WEIGHTS, spoilt, HALF, SIZE)).json()["missing"] == []
    assert code(await complete(one, upload_id)) == (422, "upload.digest_mismatch")
    assert [await two.received(upload_id, server) for server in (0, 1)] == [0, 0]
    assert (await put(other, upload_id, WEIGHTS, GOOD.weights)).status_code == 200
    assert (await complete(one, upload_id)).status_code == 201


async def test_one_file_sent_to_both_at_once_becomes_right(two: Two) -> None:
    upload_id = (await announce(two.clients[0], GOOD)).json()["id"]
    await put(two.clients[0], upload_id, CONFIG, GOOD.config)
    meet = asyncio.Barrier(2)

    async def slowly(stop: int) -> AsyncIterator[bytes]:
        yield GOOD.weights[:1000]
        await meet.wait()
        yield GOOD.weights[1000:stop]

    answers = await asyncio.wait_for(
        asyncio.gather(
            *(
                client.put(f"/v1/uploads/{upload_id}/files/{WEIGHTS}", content=slowly(SIZE))
                for client in two.clients
            )
        ),
        30,
    )
    assert {answer.status_code for answer in answers} == {200}
    assert [await two.received(upload_id, server) for server in (0, 1)] == [SIZE, SIZE]
    done = await asyncio.gather(*(complete(client, upload_id) for client in two.clients))
    assert sorted(answer.status_code for answer in done) == [200, 201], [
        answer.text for answer in done
    ]
    assert two.staged() == []


async def test_an_upload_deleted_at_one_server_is_gone_at_the_other(two: Two) -> None:
    one, other = two.clients
    upload_id = await send_all(one, GOOD)
    assert (await other.delete(f"/v1/uploads/{upload_id}")).status_code == 204
    assert two.staged() == []
    assert code(await put(one, upload_id, WEIGHTS, GOOD.weights)) == (404, "not_found")
    assert code(await complete(one, upload_id)) == (404, "not_found")


async def test_files_that_go_while_they_are_gathered_are_missing_again(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_id = await send_all(two.clients[0], GOOD)
    staged = two.apis[0].services.uploads.staged
    read = staged.read

    def read_deleted(upload_id: str, name: str) -> Any:
        pieces = read(upload_id, name)
        two.apis[1].services.uploads.staged.delete(upload_id)
        # It lists them first, and finds none of them then.
        key = f"uploads/{upload_id}/{name}-{0:016}-{secrets.token_hex(8)}"
        listed = staged_files._Piece(0, SIZE, key)
        monkeypatch.setattr(staged, "_pieces", lambda _: {name: [listed]})
        return pieces

    with monkeypatch.context() as patch:
        patch.setattr(staged, "read", read_deleted)
        assert code(await complete(two.clients[0], upload_id)) == (409, "upload.incomplete")
    monkeypatch.undo()


async def test_either_server_sweeps_what_the_other_left(two: Two) -> None:
    kept, old = [await send_all(two.clients[0], GOOD, name) for name in ("kept", "old")]
    owner = await two.apis[0].services.registry.tenants.get_tenant("acme")
    await two.apis[0].services.registry.uploads.delete(
        owner.id, old
    )  # and dies before the files go
    assert (await sweeper_of(two.apis[1].services).sweep())["staged"] == 1
    assert {kept in path for path in two.staged()} == {True}
    two.apis[1].ahead = timedelta(hours=25)
    with two.apis[1].services.uploads.writing(kept, WEIGHTS):
        assert (await sweeper_of(two.apis[1].services).sweep())["staged"] == 0
    assert (await sweeper_of(two.apis[1].services).sweep())["staged"] == 1
    assert two.staged() == []


async def test_the_default_folder_of_blobs_keeps_uploads_in_the_data_folder(
    api: Api, acme: Client
) -> None:
    await send_all(acme, GOOD)
    data_dir = api.services.config.server.data_dir
    assert {path.parents[1] for path in data_dir.rglob(f"{WEIGHTS}-*")} == {data_dir / "uploads"}


@pytest.mark.parametrize("place", ["s3"], indirect=True)
async def test_without_s3_a_piece_is_503_and_what_was_confirmed_stays(
    two: Two, s3: S3Server
) -> None:
    one, other = two.clients
    upload_id = (await announce(one, GOOD)).json()["id"]
    await put(one, upload_id, WEIGHTS, GOOD.weights[:HALF], 0, SIZE)
    with s3.refusing_keys():
        answer = await put(one, upload_id, WEIGHTS, GOOD.weights[HALF:], HALF, SIZE)
        assert code(answer) == (503, "storage.unavailable")
        assert code(await one.get(f"/v1/uploads/{upload_id}")) == (503, "storage.unavailable")
    assert await two.received(upload_id, 1) == HALF
    assert (
        await put(other, upload_id, WEIGHTS, GOOD.weights[HALF:], HALF, SIZE)
    ).status_code == 200


@pytest.fixture(params=["folder", "s3"])
def staged(request: pytest.FixtureRequest, tmp_path: Path, bucket: str) -> StagedFiles:
    return StagedFiles(PieceFolder(tmp_path) if request.param == "folder" else opened(bucket))


async def test_a_piece_is_whole_and_never_replaced(staged: StagedFiles) -> None:
    content = secrets.token_bytes(4500)
    early, late = staged.writer(UPLOAD, WEIGHTS, 0), staged.writer(UPLOAD, WEIGHTS, 0)
    for start in range(0, 3600, 900):
        early(bytearray(content[start : start + 900]))
    late(bytearray(content[:500]))
    late(bytearray())
    assert staged.sizes(UPLOAD) == {CONFIG: 0, WEIGHTS: 3600}
    staged.writer(UPLOAD, WEIGHTS, 3600)(bytearray(content[3600:]))
    early(bytearray(content[3600:]))
    assert len(staged._pieces(UPLOAD)[WEIGHTS]) == 7
    assert b"".join(staged.read(UPLOAD, WEIGHTS)) == content
    assert staged.ids() == [UPLOAD]
    staged.writer(UPLOAD, CONFIG, None)(bytearray(b"{}"))
    staged.delete(UPLOAD, WEIGHTS)
    assert staged.sizes(UPLOAD) == {CONFIG: 2, WEIGHTS: 0}
    staged.delete(UPLOAD)
    staged.delete(UPLOAD)
    assert staged.ids() == []


async def test_pieces_that_overlap_or_leave_a_gap_count_as_far_as_they_reach(
    staged: StagedFiles,
) -> None:
    content = secrets.token_bytes(100)
    folder = f"uploads/{UPLOAD}"
    for number, (start, stop) in enumerate(
        [(0, 10), (0, 30), (20, 50), (5, 8), (50, 60), (70, 100)]
    ):
        key = f"{folder}/{WEIGHTS}-{start:016}-{number:016x}"
        staged._store.put(key, bytearray(content[start:stop]))
    for name in (f"{WEIGHTS}-readme", f"other.bin-{0:016}-{0:016x}"):
        staged._store.put(f"{folder}/{name}", bytearray(b"not ours"))
    assert staged.sizes(UPLOAD) == {CONFIG: 0, WEIGHTS: 60}
    assert b"".join(staged.read(UPLOAD, WEIGHTS)) == content[:60]
    with pytest.raises(ConflictError, match="go on with byte 60"):
        staged.writer(UPLOAD, WEIGHTS, 50)
    staged.writer(UPLOAD, WEIGHTS, 60)(bytearray(content[60:75]))
    assert b"".join(staged.read(UPLOAD, WEIGHTS)) == content


async def test_a_file_takes_a_limited_number_of_small_pieces(
    staged: StagedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_files, "MAX_SHORT", 2)
    for start in (0, 1):
        staged.writer(UPLOAD, WEIGHTS, start)(bytearray(b"x"))
    with pytest.raises(ConflictError) as caught:
        staged.writer(UPLOAD, WEIGHTS, 2)
    assert caught.value.code == "upload.too_many_pieces"
    staged.writer(UPLOAD, WEIGHTS, None)
    assert staged.sizes(UPLOAD)[WEIGHTS] == 0


async def test_a_body_is_stored_in_pieces_of_a_bounded_size(
    api: Api, acme: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manylora.server.adapters.publish.STREAM_BYTES", 1000)
    upload_id = (await announce(acme, GOOD)).json()["id"]

    async def body() -> AsyncIterator[bytes]:
        for start in range(0, SIZE, 300):
            yield GOOD.weights[start : start + 300]

    sent = await acme.put(f"/v1/uploads/{upload_id}/files/{WEIGHTS}", content=body())
    assert sent.status_code == 200, sent.text
    pieces = api.services.uploads.staged._pieces(upload_id)[WEIGHTS]
    assert {piece.size for piece in sorted(pieces)[:-1]} == {1200}
    assert b"".join(api.services.uploads.staged.read(upload_id, WEIGHTS)) == GOOD.weights


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    staged = StagedFiles(PieceFolder(tmp_path))
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "uploads" / UPLOAD).mkdir()
    name = f"{WEIGHTS}-{0:016}-{0:016x}"
    (tmp_path / "uploads" / UPLOAD / name).symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic links"):
        list(staged.read(UPLOAD, WEIGHTS))


def test_a_folder_that_another_server_deletes_meanwhile_ends_the_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = StagedFiles(PieceFolder(tmp_path)).writer(UPLOAD, WEIGHTS, None)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    with pytest.raises(ConflictError) as refused:
        write(bytearray(b"piece"))
    assert refused.value.code == "upload.ended"


def test_sizes_are_of_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system answers `stat` from its cache: what another server stored would seem shorter."""
    staged = StagedFiles(PieceFolder(tmp_path))
    staged.writer(UPLOAD, WEIGHTS, None)(bytearray(b"piece"))
    monkeypatch.setattr(os, "stat", lambda *_, **__: pytest.fail("from the cache"))
    assert staged.sizes(UPLOAD)[WEIGHTS] == len(b"piece")


def test_an_id_is_no_path(tmp_path: Path) -> None:
    staged = StagedFiles(PieceFolder(tmp_path))
    for ask in (staged.sizes, staged.delete, lambda name: staged.writer(name, WEIGHTS, None)):
        with pytest.raises(ValueError, match="no id of an upload"):
            ask("../secret")


def opened(bucket: str) -> Any:
    from manylora.adapters.blobs.bucket import Bucket

    return Bucket(bucket, "manylora", allow_http=True)
