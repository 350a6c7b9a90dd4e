"""The regions of Google Cloud. No library here has a list, so a new number of a known part of the world passes.

https://docs.cloud.google.com/compute/docs/regions-zones
"""

from __future__ import annotations

import re
from difflib import get_close_matches

AREAS = ("africa", "asia", "australia", "europe", "me", "northamerica", "southamerica", "us")
REGIONS = {
    "africa-south": 1,
    "asia-east": 2,
    "asia-northeast": 3,
    "asia-south": 2,
    "asia-southeast": 3,
    "australia-southeast": 2,
    "europe-central": 2,
    "europe-north": 2,
    "europe-southwest": 1,
    "europe-west": 12,
    "me-central": 2,
    "me-west": 1,
    "northamerica-northeast": 2,
    "northamerica-south": 1,
    "southamerica-east": 1,
    "southamerica-west": 1,
    "us-central": 2,
    "us-east": 7,
    "us-south": 1,
    "us-west": 8,
}  # the highest number of each so far


def wrong_region(region: str) -> str | None:
    area = re.sub(r"\d+$", "", region)
    word, _, side = area.partition("-")
    if word in AREAS and re.fullmatch("(north|south)?(east|west)?|central", side) and side:
        return None  # also of an area that has none yet
    names = [f"{area}{number}" for area, count in REGIONS.items() for number in range(1, count + 1)]
    near = get_close_matches(region, names, n=2)
    return f"{region!r} is not a region of Google Cloud" + (f"; did you mean {' or '.join(near)}?" if near else ", such as us-central1")
