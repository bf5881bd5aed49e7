"""
A Hub on localhost: the HTTP API that `huggingface_hub` uses for models, with commits, branches, pull requests and LFS.

State is what a client could read back: repositories with refs that point to commits, a commit being a parent and the
files of a tree. A commit is made as a whole or not at all. Faults are injected by request: see [`Fault`].
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


TOKEN = "hf_secret"
READ_ONLY = "hf_reader"
LARGE = 4096  # files from this size on go through LFS, and so do all safetensors


@dataclass
class Fault:
    """
    What goes wrong.

    Args:
        kind: a status code; `"drop"`, which closes the connection unanswered before anything happened; or `"lost"`,
            which closes it after the request was carried out.
        first, count (`int`): The number of the first request concerned, from 0, and of how many; -1 for all later.
        match (`str`): A regular expression; only requests whose `METHOD path` it finds count at all.
    """

    kind: int | str
    first: int = 0
    count: int = 1
    match: str = ""
    seen: int = 0

    def strikes(self, request: str) -> bool:
        if not re.search(self.match, request):
            return False
        number, self.seen = self.seen, self.seen + 1
        return number >= self.first and (self.count < 0 or number < self.first + self.count)


@dataclass
class Commit:
    oid: str
    parent: str | None
    title: str
    files: dict[str, bytes]


@dataclass
class Repo:
    private: bool
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)

    def add(self, parent: str | None, title: str, files: dict[str, bytes]) -> Commit:
        oid = uuid.uuid4().hex + uuid.uuid4().hex[:8]  # never seen before, so that no cache knows it
        self.commits[oid] = Commit(oid, parent, title, files)
        return self.commits[oid]

    def resolve(self, revision: str) -> Commit | None:
        return self.commits.get(self.refs.get(revision, revision))


def is_lfs(path: str, size: int) -> bool:
    return path.endswith((".safetensors", ".bin")) or size >= LARGE


def blob_id(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


class HubServer:
    """
    The server; use as a context manager.

    Attributes:
        endpoint (`str`): Its address.
        repos (`dict[str, Repo]`): What it holds.
        requests (`list[str]`): `METHOD path` of every request, in order.
        fault ([`Fault`]): What goes wrong at present.
    """

    def __init__(self):
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fault: Fault | None = None
        self.lock = threading.RLock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """The files at a revision; none where it does not exist."""
        repo = self.repos.get(repo_id)
        commit = None if repo is None else repo.resolve(revision)
        return {} if commit is None else dict(commit.files)

    def titles(self, repo_id: str, revision: str = "main") -> list[str]:
        """Titles of the commits of a revision, newest first."""
        repo, titles = self.repos[repo_id], []
        commit = repo.resolve(revision)
        while commit is not None:
            titles.append(commit.title)
            commit = repo.commits.get(commit.parent)
        return titles


class _Problem(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, **content):
        self.status, self.message, self.code, self.content = status, message, code, content


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    routes = [
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<revision>[^/]+)", "branch"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/refs", "refs"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)", "tree"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/revision/(?P<revision>[^/]+)", "info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)", "info"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/upload/(?P<oid>[0-9a-f]{64})", "upload"),
        ("POST", r"/verify", "verify"),
        ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    ]

    def log_message(self, *args):
        pass

    def _handle(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        parts = urlsplit(self.path)
        with self.hub.lock:
            request = f"{self.command} {parts.path}"
            self.hub.requests.append(request)
            fault = self.hub.fault
            kind = fault.kind if fault is not None and fault.strikes(request) else None
            if kind == "drop":
                return self._close()
            try:
                if isinstance(kind, int):
                    raise _Problem(kind, f"injected {kind}")
                status, headers, content = self._route(parts.path, parse_qs(parts.query), body)
            except _Problem as problem:
                headers = {"X-Error-Message": problem.message}
                if problem.code is not None:
                    headers["X-Error-Code"] = problem.code
                if problem.status == 429:
                    headers["Retry-After"] = "0"
                status, content = problem.status, json.dumps({"error": problem.message, **problem.content}).encode()
            if kind == "lost":
                return self._close()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_HEAD = _handle

    def _close(self):
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.close()

    def _route(self, path, query, body):
        method = "GET" if self.command == "HEAD" else self.command
        for wanted, pattern, name in self.routes:
            match = re.fullmatch(pattern, path)
            if match and wanted == method:
                arguments = {key: unquote(value) for key, value in match.groupdict().items()}
                answer = getattr(self, f"_{name}")(query, body, **arguments)
                if isinstance(answer, tuple):
                    return answer
                return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()
        raise _Problem(404, f"no such path {self.command} {path}")

    # Who may do what

    def _token(self):
        header = self.headers.get("Authorization") or ""
        token = header.removeprefix("Bearer ") if header else None
        if token is not None and token not in (TOKEN, READ_ONLY):
            raise _Problem(401, "Invalid username or password.")
        return token

    def _write(self):
        token = self._token()
        if token is None:
            raise _Problem(401, "Invalid username or password.")
        if token == READ_ONLY:
            raise _Problem(403, "Forbidden: you must use a write token.")

    def _repo(self, name) -> Repo:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and self._token() is None):
            raise _Problem(404 if self._token() else 401, "Repository not found", "RepoNotFound")
        return repo

    def _at(self, repo: Repo, revision: str) -> Commit:
        commit = repo.resolve(revision)
        if commit is None:
            raise _Problem(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # The API

    def _whoami(self, query, body):
        self._write()
        return {"name": "user", "type": "user", "orgs": []}

    def _validate(self, query, body):
        """As strict as the real one where it matters here: YAML, and a model-index that is complete."""
        content = json.loads(body)["content"]
        match = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        try:
            data = yaml.safe_load(match.group(1)) if match else {}
            for model in data.get("model-index", []):
                for result in model["results"]:
                    assert {"type", "name"} <= set(result["dataset"]) and result["task"]["type"]
                    assert all("type" in metric and "value" in metric for metric in result["metrics"])
        except (yaml.YAMLError, KeyError, TypeError, AssertionError, AttributeError) as error:
            answer = json.dumps({"errors": [{"message": repr(error)}], "warnings": []}).encode()
            return 400, {"Content-Type": "application/json"}, answer
        return {"errors": [], "warnings": []}

    def _create(self, query, body):
        self._write()
        wanted = json.loads(body)
        name = f"{wanted.get('organization') or 'user'}/{wanted['name']}"
        url = f"{self.hub.endpoint}/{name}"
        if name in self.hub.repos:
            raise _Problem(409, "You already created this model repo", url=url)
        repo = self.hub.repos[name] = Repo(
            private=wanted.get("visibility") == "private" or wanted.get("private", False)
        )
        repo.refs["main"] = repo.add(None, "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"}).oid
        return {"url": url, "name": name}

    def _info(self, query, body, repo, revision="main"):
        found = self._repo(repo)
        commit = self._at(found, revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        return {
            "id": repo,
            "modelId": repo,
            "sha": commit.oid,
            "private": found.private,
            "siblings": siblings,
            "tags": [],
        }

    def _refs(self, query, body, repo):
        found = self._repo(repo)

        def listed(select, prefix):
            return [
                {"name": name, "ref": f"{prefix}{name}", "targetCommit": oid}
                for name, oid in found.refs.items()
                if select(name)
            ]

        pulls = listed(lambda name: name.startswith("refs/pr/"), "")
        return {
            "branches": listed(lambda name: not name.startswith("refs/"), "refs/heads/"),
            "tags": [],
            "converts": [],
            "pullRequests": pulls,
        }

    def _branch(self, query, body, repo, revision):
        self._write()
        found = self._repo(repo)
        if revision in found.refs:
            raise _Problem(409, "Reference already exists")
        start = (json.loads(body or b"{}") or {}).get("startingPoint", "main")
        found.refs[revision] = self._at(found, start).oid
        return {}

    def _tree(self, query, body, repo, revision):
        commit = self._at(self._repo(repo), revision)
        entries = []
        for path, content in sorted(commit.files.items()):
            entry = {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
            if is_lfs(path, len(content)):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
            entries.append(entry)
        return entries

    def _preupload(self, query, body, repo, revision):
        self._write()
        commit = self._at(self._repo(repo), revision)
        files = []
        for file in json.loads(body)["files"]:
            mode = "lfs" if is_lfs(file["path"], file["size"]) else "regular"
            old, oid = commit.files.get(file["path"]), None
            if old is not None:
                oid = hashlib.sha256(old).hexdigest() if mode == "lfs" else blob_id(old)
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": files}

    def _batch(self, query, body, repo):
        self._write()
        self._repo(repo)
        objects = []
        for wanted in json.loads(body)["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.objects:
                href = f"{self.hub.endpoint}/upload/{wanted['oid']}"
                entry["actions"] = {"upload": {"href": href}, "verify": {"href": f"{self.hub.endpoint}/verify"}}
            objects.append(entry)
        return {"transfer": "basic", "objects": objects}

    def _upload(self, query, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Problem(400, "The content is not what was announced")
        self.hub.objects[oid] = body
        return {}

    def _verify(self, query, body):
        if json.loads(body)["oid"] not in self.hub.objects:
            raise _Problem(404, "No such object")
        return {}

    def _commit(self, query, body, repo, revision):
        self._write()
        found = self._repo(repo)
        base = self._at(found, revision)
        files, header = dict(base.files), {}
        for line in body.splitlines():
            item = json.loads(line)
            kind, value = item["key"], item["value"]
            if kind == "header":
                header = value
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise _Problem(400, f"LFS object {value['oid']} was never uploaded")
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif kind == "deletedFile":
                if files.pop(value["path"], None) is None:
                    raise _Problem(404, "A file with this name doesn't exist", "EntryNotFound")
            else:
                raise _Problem(400, f"Unknown operation {kind}")
        if header.get("parentCommit") not in (None, base.oid):
            raise _Problem(412, "A commit has happened since. Please refresh and try again.")
        made = found.add(base.oid, header["summary"], files)
        answer = {"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{made.oid}", "commitOid": made.oid}
        if query.get("create_pr"):
            number = 1 + sum(name.startswith("refs/pr/") for name in found.refs)
            found.refs[f"refs/pr/{number}"] = made.oid
            answer["pullRequestUrl"] = f"{self.hub.endpoint}/{repo}/discussions/{number}"
        elif revision in found.refs:
            found.refs[revision] = made.oid
        else:
            raise _Problem(404, f"{revision} is no branch", "RevisionNotFound")
        return answer

    def _resolve(self, query, body, repo, revision, path):
        commit = self._at(self._repo(repo), revision)
        content = commit.files.get(path)
        headers = {"X-Repo-Commit": commit.oid}
        if content is None:
            raise _Problem(404, "Entry not found", "EntryNotFound")
        etag = hashlib.sha256(content).hexdigest() if is_lfs(path, len(content)) else blob_id(content)
        return 200, {**headers, "ETag": f'"{etag}"', "Content-Type": "application/octet-stream"}, content


@contextlib.contextmanager
def on_line(hub: HubServer, monkeypatch, cache):
    """Let `huggingface_hub` and transformers of this process talk to `hub`, as `HF_ENDPOINT` does for a new one."""
    import huggingface_hub
    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils import _http

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.endpoint)
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(hf_api.api, "endpoint", hub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    huggingface_hub.close_session()
    yield hub
    huggingface_hub.close_session()


__all__ = ["READ_ONLY", "TOKEN", "Fault", "HubServer", "Repo", "blob_id", "on_line"]
