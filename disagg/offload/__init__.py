"""KV beside the GPU: in host memory, and in storage that every server of a model shares.

manager          what is copied and stored when, of each sequence                              pure
spans, instructions   what it remembers; what it says                                          pure
host             which pages of the host pool hold what                                        pure
rules, acks      where a sequence is cut; what every rank has reported                         pure
keys, units      what pages and tenants are called; which rank writes which heads of them
objects          the bytes of a stored object, and how they are checked before they are believed
causes           why stored KV cannot be had                                                   pure
options, breaker where storage is and how its client is set up; when a store that fails is left alone    pure
store            objects by path, through obstore; every call has a deadline
tier             spans of pages in a store: found, read, written, published
survey           all that a store holds: statistics, verification, budget
"""
