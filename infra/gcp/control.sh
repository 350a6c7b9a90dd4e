data_disk() { echo /dev/disk/by-id/google-data; }

server_token() {
  /opt/flotilla/bin/python - "$secret" <<'PYTHON'
import base64
import sys

import google.auth
from google.auth.transport.requests import AuthorizedSession

credentials, _ = google.auth.default()
version = f"https://secretmanager.googleapis.com/v1/{sys.argv[1]}/versions/latest:access"
answer = AuthorizedSession(credentials).get(version, timeout=30)
answer.raise_for_status()
print(base64.b64decode(answer.json()["payload"]["data"]).decode())
PYTHON
}

let_in() { :; } # whoever OS Login knows, by its own keys
