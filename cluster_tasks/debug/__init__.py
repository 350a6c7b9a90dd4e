"""Why a cluster hangs: what each of its processes is doing, and all that it has written, in one archive.

probe      one node's processes and their stacks; goes to nodes as text, so it imports the standard library alone
gather     runs the probe on every node: here on a local cluster, by a small Ray job on others
stacks     equal stacks together, and who waits for whom; pure
collect    the archive
redact     secrets out of whatever leaves
"""
