"""On the path of a dstack server: what it asks of a cloud goes to the one that lab/dstack/market.py plays."""

import json
import os

import requests

CLOUDS = json.loads(os.environ.get("FLOTILLA_CLOUDS", "{}"))
ask = requests.request


def request(method, url, **more):
    for real, played in CLOUDS.items():
        url = url.replace(real, played, 1) if url.startswith(real) else url
    return ask(method, url, **more)


requests.request = request
