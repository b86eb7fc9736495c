"""A scheduled program of a loop on two nodes of four GPUs, for the tests of exposed exchanges."""

WITHIN, BETWEEN = "{{0,1,2,3},{4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}"
# A kernel reads and writes 4 MB each, 8 ms. A sum of 4 MB over four devices takes 6 ms, and one
# over two nodes 40 ms.
TEXT = """HloModule step, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%limit (t: (s32[], f32[1000000])) -> pred[] {
  %t = (s32[], f32[1000000]{0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%n, %three), direction=LT
}

%round (t: (s32[], f32[1000000])) -> (s32[], f32[1000000]) {
  %t = (s32[], f32[1000000]{0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %x = f32[1000000]{0} get-tuple-element(%t), index=1
BODY
  ROOT %out = (s32[], f32[1000000]{0}) tuple(%n, %x)
}

ENTRY %main (p: (s32[], f32[1000000])) -> (s32[], f32[1000000]) {
  %p = (s32[], f32[1000000]{0}) parameter(0)
  ROOT %loop = (s32[], f32[1000000]{0}) while(%p), condition=%limit, body=%round
}
"""


def start(name, groups, more=""):
    return (
        f"  %{name} = ((f32[1000000]{{0}}), f32[1000000]{{0}}) all-reduce-start(%x),"
        f" replica_groups={groups}, to_apply=%sum{more}"
    )


def done(name):
    return f"  %{name}-done = f32[1000000]{{0}} all-reduce-done(%{name})"


def kernel(name):
    return f"  %{name} = f32[1000000]{{0}} negate(%x)"


def text(*body):
    """Return a program of a loop of three rounds with these instructions."""
    return TEXT.replace("BODY", "\n".join(body))
