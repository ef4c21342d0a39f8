"""Record what a real server answers to the contract suite, for the double to replay.

    python tests/sglang/record.py --python .sglang-env/bin/python

Starts a server on the tests' model, puts a proxy before it that writes everything down, and runs the suite through it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from sglang_fixtures import ROOT, Double, find_python, make_model, start_server

OUT = Path(__file__).parent / "recorded" / "contract.json"
SUITE = ROOT / "tests" / "contract" / "test_backends.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, default=find_python(), help="that has sglang")
    parser.add_argument("--url", help="of a server that runs already on the tests' model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        model = make_model(Path(base) / "model")
        started = (
            None if options.url else start_server(options.python, model, Path(base) / "log", "--skip-tokenizer-init")
        )
        url = options.url or started.url
        traffic: list[dict[str, Any]] = []
        proxy = Double(lambda method, path, body: passed_on(url, method, path, body, traffic)).start()
        environment = {**os.environ, "GYMTUNE_TEST_SGLANG_URL": proxy.url}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(SUITE), "-m", "sglang"]
        failed = subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode
        version = ask(url, "GET", "/server_info", None)[1]["version"]
        proxy.stop()
        if started is not None:
            started.end()
    if failed:
        sys.exit("the suite failed: nothing was written")
    OUT.parent.mkdir(exist_ok=True)
    rows = [json.dumps(row, ensure_ascii=False) for row in traffic if row["path"] != "/abort_request"]
    OUT.write_text(f'{{"sglang": "{version}", "traffic": [\n' + ",\n".join(rows) + "\n]}\n", encoding="utf-8")
    print(f"{OUT}: {len(rows)} answers of sglang {version}")


def passed_on(url: str, method: str, path: str, body: Any, traffic: list[dict[str, Any]]) -> tuple[int, Any]:
    """Ask the real server and write down what it says, without the paths of this machine."""
    status, answer = ask(url, method, path, body)
    kept = {name: value for name, value in body.items() if name != "rid"} if isinstance(body, dict) else body
    traffic.append({"method": method, "path": path, "body": kept, "status": status, "answer": trimmed(path, answer)})
    return status, answer


def trimmed(path: str, answer: Any) -> Any:
    """Return what is worth keeping of an answer: of the hundreds of fields of a server's own page only those read."""
    if path == "/server_info":
        names = (
            "version",
            "max_req_input_len",
            "skip_tokenizer_init",
            "enable_lora",
            "lora_paths",
            "tp_size",
            "dp_size",
        )
        return {name: answer.get(name) for name in names}
    if path == "/model_info":
        names = ("is_generation", "weight_version", "model_type", "preferred_sampling_params")
        return {
            "model_path": "/models/tiny",
            "tokenizer_path": "/models/tiny",
            **{name: answer[name] for name in names},
        }
    return answer


def ask(url: str, method: str, path: str, body: Any) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    try:
        return status, json.loads(text) if text else None
    except ValueError:
        return status, text


if __name__ == "__main__":
    main()
