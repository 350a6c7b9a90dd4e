"""A search engine for agents: an index made once, and a server of it on every node.

    flotilla index build corpus.jsonl --kind bm25 --out /checkpoints/wiki
    python /checkpoints/wiki/serve.py --host $FLOTILLA_NODE_IP --port 8000     a service of the stack

`build.py` makes the index's folder, `serve.py` searches in it and answers over HTTP as Search-R1's server does. A copy of serve.py lies in
each index, so that a node needs the packages of the extra `retrieval` and not this project. bm25s and FAISS find; nothing here ranks.
Runs in `flotilla index`, and in a service of each node.
"""
