"""`attention` as operators of PyTorch, for its compiler, its exporter and its transforms.

A mask and a score cross as one text and a flat list of tensors (`crossing`); on the other side they
are made again (`rebuilding`) and go the way of any call (`library`). Calls that nothing watches do
not come here: an operator's dispatch costs them more than their own.
"""
