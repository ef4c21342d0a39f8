"""Pass requests and answers through SGLang's own types. Run by the Python that has SGLang; imports nothing heavy.

Reads a JSON list of `{"path", "body", "status", "answer"}` from standard input, prints how many were checked.
"""

import importlib.util
import json
import sys
import sysconfig
from pathlib import Path

where = Path(sysconfig.get_path("purelib")) / "sglang/api/v1/api_types.py"
spec = importlib.util.spec_from_file_location("api_types", where)
types = importlib.util.module_from_spec(spec)
sys.modules["api_types"] = types
spec.loader.exec_module(types)

answers = {"/generate": types.GenerateResponse, "/model_info": types.GetModelInfoResponse}
checked = 0
for row in json.load(sys.stdin):
    if row["path"] == "/generate":
        types.GenerateRequest.from_json_value(row["body"])
        checked += 1
    if row["path"] in answers and row["status"] == 200:
        answers[row["path"]].from_json_value(row["answer"])
        checked += 1
print(checked)
