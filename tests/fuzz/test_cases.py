"""Cases worth trying every time: each is a kind of input that once did harm, or nearly."""

from __future__ import annotations

import shlex

import pytest

from tests.fuzz.archives import Archive, Member
from tests.fuzz.campaign import examine
from tests.fuzz.sandbox import Sandbox
from tests.fuzz.tampering import Tamper
from tests.slow import slow

DEMO = "train --preset demo --device cpu --out new"
RUN = Member("cell/config.json", "file", "", 0)

COMMAND_LINES = (
    "suite run suite.py:mine --out cells --device cpu --pack run/config.json",
    "suite run suite.py:mine --out cells --device cpu --pack missing/new.tar.gz",
    "suite run suite.py:mine --out cells --device cpu --pack empty",
    f"{DEMO} optim.lr=1e400",
    f"{DEMO} optim.lr=Infinity",
    f"{DEMO} optim.lr=1e300",
    f"{DEMO} optim.clip=NaN",
    f"{DEMO} optim.weight_decay=Infinity",
    f"{DEMO} model.gate_bias=NaN",
    f"{DEMO} model.gate_bias=Infinity",
    f"{DEMO} model.margin=-1",
    f"{DEMO} model.margin=NaN",
    f"{DEMO} model.margin=wide",
    f"{DEMO} model.threshold=inf",
    f"{DEMO} model.mechanism=rope model.margin=2",
    f"{DEMO} task.name=copy 'task.arguments={{}}' task.arguments.alphabet={2**64}",
    f"{DEMO} task.name=copy 'task.arguments={{}}' task.arguments.alphabet={10**9}",
    f"{DEMO} task.arguments.length={2**64}",
    f"{DEMO} train.seed={2**64}",
    f"{DEMO} train.seed=-1",
    f"{DEMO} train.steps={'9' * 5000}",
    f"{DEMO} train.steps={'9' * 400} train.log_every={2**64}",
    f"{DEMO} optim.lr={'9' * 400}",
    f"{DEMO} model.d_model={10**9}",
    f"{DEMO} model.n_layers={10**9}",
    f"{DEMO} train.batch_size={2**64}",
    f"{DEMO} evaluate.examples={2**64}",
    f"{DEMO} train.steps={'[' * 5000}",
    f"{DEMO} optim.beta1=7",
    f"{DEMO} optim.beta2=NaN",
    f"{DEMO} model.d_model=0",
    f"{DEMO} model.n_heads=3",
    f"{DEMO} model.dropout=2",
    *(f"train --preset demo --out new --device {device}" for device in ("meta", "mps", "xpu", "cuda:99", "cpu:7",
      "vulkan")),
    f"train --preset demo --out new --device cpu --time-limit {'9' * 400}h",
    *(f"train --preset demo --device cpu --out {place}" for place in (
        "a.txt", "a.txt/below", "/proc/self/none", "/dev/null", "''", "x" * 300, "dangling", "empty")),
    "train --preset demo --device cpu --overwrite --out a.txt",
    "train --preset demo --device cpu --overwrite --out link",
    "train --resume --out a.txt", "train --resume --out missing", "train --config run", "train --config missing.json",
    "train --config /dev/null", "train --config model",
    *(f"{verb} {run}" for verb in ("evaluate", "generate", "attend") for run in ("a.txt", "x" * 300, "''",
      "run/config.json")),
    "evaluate run --rows missing.txt", "evaluate run --rows run", "evaluate run --rows /dev/null",
    "evaluate run --rows run/model.safetensors", "evaluate run --splits iid --diagnose",
    f"evaluate run --examples {2**64}",
    "evaluate run --examples 0", "evaluate run --examples -1", f"evaluate run --splits iid --seed {2**64}",
    "evaluate text --text a.txt", "evaluate text --text run", f"evaluate text --windows {2**64}",
    "evaluate text --windows 0",
    "evaluate text --windows -8", "evaluate text --windows 8 --maps 99", "evaluate run --splits iid --device meta",
    f"generate run --prompt w1i0r --seed {2**64}", f"generate run --top-k {2**64}", f"generate run --number {2**64}",
    "generate run --temperature nan", "generate run --temperature inf", "generate run --temperature 1e-300",
    "generate run --temperature -1", "generate run --top-p nan", f"generate text --max-new-tokens {2**64}",
    "generate run --prompt w1i0r --device meta", "generate text --prompt 'new\udcff'",
    "attend run --out missing/deeper/new.png", "attend run --out a.txt/new.png",
      "attend run --out /proc/self/none.png",
    f"attend run --rows 0 {2**64}", "attend run --layers 99", "attend run --heads -1", "attend run --rows 5 2",
    f"attend text --start {2**64}", f"attend text --window {2**64}", "attend text --window -1",
    f"attend run --seed {2**64}", "attend run --text store", "attend text --text a.txt",
    "prepare a.txt a.txt/below --tokenizer bytes", "prepare a.txt /proc/self/none --tokenizer bytes",
    "prepare a.txt '' --tokenizer bytes", "prepare '' new --tokenizer bytes", "prepare run new --tokenizer bytes",
    "prepare store new --tokenizer bytes", f"prepare a.txt {'x' * 300} --tokenizer bytes", "prepare /dev/null new",
    f"prepare a.txt new --tokenizer bytes --hold-out {2**64}", "prepare a.txt dangling --tokenizer bytes",
    "prepare a.txt run --tokenizer bytes --overwrite", "prepare a.txt new --tokenizer gpt2 --tokenizer-files run",
    "prepare a.txt new --tokenizer gpt2 --tokenizer-files a.txt", "prepare . new --tokenizer bytes",
    "prepare model new --tokenizer bytes --format wikitext", "prepare b.jsonl new --tokenizer bytes --format tokens",
    "suite status suite.py:mine --out a.txt", "suite table suite.py:mine --out a.txt", "suite status suite.py:wrong",
    "suite run suite.py:mine --out a.txt", "suite run suite.py:mine --out /proc/self/none", "suite status a.txt:x",
    "suite status bad.py:x", "suite run suite.py:nothing", "suite table suite.py:nothing", "suite status /:x.py:y",
    f"suite run suite.py:mine --jobs {2**64}", f"suite run suite.py:mine --budget {'9' * 400}h",
    "suite merge a.txt --out merged", "suite merge cells --out a.txt", "suite merge cells --out cells",
    "suite merge missing --out merged", "suite merge cells.tar.gz --out /proc/self/none",
    "suite merge run --out merged",
    "suite merge /dev/null --out merged", "suite merge cells --out ''",
    "report", "report alice", "report alice --out new.html", "report part", "report run text",
      "report run --out a.txt",
    "report run --out a.txt/new.html", "report run --out /proc/self/none", "report run --out /proc/self/none.html",
    "report missing --out new.html", "report --index a.txt", "report --index missing", "report --index cells",
    "report run run run --out new.html", f"report run --out {'x' * 300}", f"report run --out {'x' * 300}.html",
    "report run --out with.html/new.html", "report cells",
    "export run a.txt", "export run a.txt/below", "export run /proc/self/none", f"export run {'x' * 300}",
    "export part new", "export run ''", "export run run --overwrite", "export text new --tokenizer-files run",
    "calibrate run --sequences 2", "calibrate run --sequences 2 --out run/config.json", "calibrate other",
    "calibrate text --length 8 --sequences 2 --out new/windows.json", f"calibrate text --length {2**62}",
    "calibrate run --sequences 2 --out a.txt/windows.json", "calibrate run --sequences 2 --out /proc/self/none.json",
    "calibrate run --sequences 2 --out dangling", "calibrate text stores", "calibrate text store --length 1",
    f"calibrate run --sequences {2**64}", "calibrate run --tolerance 1e-400", "calibrate text store/tokens.bin",
    *(f"generate run --memory {memory}" for memory in ("calibrated", "0", "-1", "x", "run/config.json",
      "text/windows.json",
      "run", "missing.json", "/dev/null", str(2**40), str(2**63 - 1), "9" * 400, "8")),
    "generate other --memory run/windows.json", "generate margin --memory run/windows.json",
    "generate text --memory calibrated --max-new-tokens 40", "generate mine --memory 8 --import own_mechanism.py",
    "evaluate mine", "evaluate mine --import own_mechanism.py", "evaluate mine --import evil.py --import own_task.py",
    "evaluate mine --import mine/own_mechanism.py --import own_task.py", "evaluate run --import folder.py",
    "evaluate run --import a.txt", "evaluate run --import renamed.py", "evaluate run --import missing.py",
    "evaluate mine --import own_mechanism.py --import mine/own_mechanism.py", "report mine --out new.html",
    "evaluate mine --import linked.py --import own_task.py", "export mine new", "suite run suite.py:ours --out ours",
    "suite merge . --out merged", "train --config mine/config.json --out new", "train --resume --out mine",
    *(f"{DEMO} model.mechanism={name}" for name in ("evil.py:Evil", "run/evil.py:Evil", "./evil.py:Evil", "evil",
      "evil.Evil",
      "own_mechanism.py:DenseAttention", "own_mechanism.py:__loader__", "linked.py:Windowed", "renamed.py:Windowed",
      "missing.py:X", "folder.py:X")),
    f"{DEMO} task.name=own_task.py:Task 'task.arguments={{}}'", f"{DEMO} model.arguments.window=3",
    f"{DEMO} model.mechanism=own_mechanism.py:Windowed model.arguments.window=x",
    f"{DEMO} model.mechanism=own_mechanism.py:Windowed model.arguments.window={2**64}",
    f"{DEMO} train.parallel=fsdp train.checkpoint_activations=true", f"{DEMO} train.parallel=x",
    "demo --out a.txt", "demo --out run", f"demo --seed {2**64}", "bench x", "bench decode", "bench op --device meta",
)  # fmt: skip

DAMAGED = (
    ((Tamper(".store.preparing", "link", 4),), "prepare a.txt store --tokenizer bytes --overwrite"),
    ((Tamper(".new.preparing", "link", 4),), "prepare a.txt new --tokenizer bytes"),
    ((Tamper(".new.preparing", "empty"),), "prepare a.txt new --tokenizer bytes"),
    ((Tamper(".new.preparing", "folder", 1),), "prepare a.txt new --tokenizer bytes"),
    ((Tamper(".new.exporting", "link", 4),), "export run new"),
    ((Tamper("merged/.unpacked", "link", 5),), "suite merge cells.tar.gz --out merged"),
    *(((Tamper(f"run/{file}", "line", where, 3),), command)
      for file, command in (("eval.jsonl", "evaluate run --splits iid"), ("metrics.jsonl",
      "train --resume --out run"),
                            ("eval.jsonl", "report run --out new.html"), ("diagnose.jsonl",
                            "report run --out new.html"),
                            ("diagnose.jsonl", "evaluate run --splits iid --diagnose --json"))
      for where in (0, 11, 26, 36)),
    *(((Tamper("part/metrics.jsonl", "line", where, 3),), "train --resume --out part") for where in (0, 6, 11, 16, 21,
      26)),
    *(((Tamper("text/perplexity.jsonl", "line", where, 3),), command) for where in (0, 6, 11, 21, 26)
      for command in ("evaluate text --windows 8", "report text --out new.html")),
    *(((Tamper("run/model.safetensors", kind, where),), command)
      for kind, where in (("truncate", 50), ("empty", 0), ("tensors", 0), ("tensors", 6), ("tensors", 9),
      ("header", 1),
                          ("folder", 0), ("swap", 0), ("tensors", 21))
      for command in ("train --resume --out run", "generate run --prompt w1i0r", "evaluate run --splits iid")),
    *(((Tamper("part/checkpoints/step-00000001.safetensors", kind, where),), "train --resume --out part")
      for kind, where in (("truncate", 50), ("tensors", 0), ("tensors", 6), ("tensors", 15), ("tensors", 18),
      ("tensors", 19),
                          ("header", 1), ("folder", 0), ("swap", 0), ("tensors", 21))),
    *(((Tamper("run/attend.npz", kind, where),), "report run --out new.html")
      for kind, where in (("array", 3), ("array", 4), ("array", 7), ("array", 18), ("array", 30), ("array", 41),
      ("array", 52),
                          ("truncate", 50), ("flip", 99), ("folder", 0), ("array", 15))),
    *(((Tamper(f"run/{file}", "whole", 0, value),), command)
      for value in ([], None, 3, {"sessions": 3}, {"sessions": [3]}, "deep")
      for file, command in (("environment.json", "train --resume --out run"), ("environment.json",
      "report run --out new.html"),
                            ("config.json", "generate run"), ("eval.jsonl", "report run --out new"))),
    *(((Tamper("part/environment.json", "whole", 0, value),), "train --resume --out part")
      for value in ([], None, 3, {"sessions": 3}, {"sessions": [3]}, "deep")),
    ((Tamper("store/documents.npy", "flip", 34),), "train --preset text-demo --out new task.arguments.data=store"),
    ((Tamper("text/perplexity.jsonl", "append"),) * 2, "evaluate text --windows 8"),
    *(((Tamper("stores/valid/documents.npy", kind, where),), "evaluate text --windows 8")
      for kind, where in (("array", 0), ("array", 1), ("array", 2), ("array", 3), ("array", 4), ("array", 7),
      ("array", 9),
                          ("flip", 7), ("flip", 77), ("truncate", 90), ("folder", 0), ("empty", 0))),
    *(((Tamper("store/manifest.json", "leaf", where, value),), "evaluate text --text store --windows 8")
      for where in range(0, 140, 28) for value in (2**64, None, [])),
    *(((Tamper("store/tokens.bin", kind, 50),), "evaluate text --text store --windows 8")
      for kind in ("truncate", "empty", "folder", "flip", "twice", "delete")),
    *(((Tamper("config.json", "whole", 0, value),), "train --config config.json --out new") for value in ("deep", [],
      10**399)),
    ((Tamper("config.json", "digits"),), "train --config config.json --out new"),
    *(((Tamper(f"{run}/{file}", "whole", 0, value),), f"export {run} new") for value in ([], None, {"split": 3},
      "deep")
      for run, file in (("run", "eval.jsonl"), ("run", "environment.json"), ("text", "perplexity.jsonl"))),
    *(((Tamper("text/windows.json", "leaf", where, value),), "generate text --memory calibrated --max-new-tokens 20")
      for where in range(0, 280, 28) for value in (0, 2**40, 2**63, 1e300, True, [], "deep")),
    *(((Tamper("text/windows.json", kind, where),), command) for kind, where in (("truncate", 50), ("empty", 0),
      ("folder", 0), ("flip", 99), ("twice", 0), ("swap", 4), ("link", 2), ("link", 6), ("garbage", 9), ("digits", 1))
      for command in ("generate text --memory calibrated", "calibrate text --length 16 --sequences 2")),
    ((Tamper("text/model.safetensors", "tensors", 9),), "generate text --memory calibrated"),
    *(((Tamper(file, "names", 20 * imports + name + 140 * kind),), command) for file, command in (
      ("mine/config.json", "evaluate mine"), ("config.json", "train --config config.json --out new"))
      for name in (0, 2, 6, 8, 11) for imports in (0, 1, 5) for kind in (0, 1)),
    *(((Tamper("sharded/checkpoints/step-00000001" + file, kind, where),), "train --resume --out sharded")
      for file in ("/manifest.json", "/shard-00001-model-00001-of-00001.safetensors", "")
      for kind, where in (("truncate", 50), ("empty", 0), ("delete", 0), ("folder", 1), ("flip", 651), ("garbage", 3),
                          ("link", 5), ("header", 1))),
    *(((Tamper("sharded/checkpoints/step-00000001/manifest.json", "whole", 0, value),),
      "train --resume --out sharded")
      for value in ([], None, 3, {"x": 3}, "deep")),
    *(((Tamper(f"part/{file}", "link", where),), "train --resume --out part") for where in (0, 4, 5, 6)
      for file in ("metrics.jsonl", "checkpoints", "model.safetensors", "lock", "environment.json")),
    ((Tamper("sharded/checkpoints/.step-00000001.saving", "link", 4),), "train --resume --out sharded"),
    ((Tamper(".run.overwriting", "link", 4),), "train --overwrite --preset demo --out run"),
    ((Tamper("cells/.merging-1", "link", 4),), "suite merge cells.tar.gz --out cells"),
)  # fmt: skip

HOSTILE = (
    (Member("../evil.txt", "file", "", 21), RUN),
    (Member("BESIDE/evil.txt", "file", "", 21), RUN),
    (Member("cell/link", "symlink", "../../..", 0), Member("cell/link/evil.txt", "file", "", 21), RUN),
    (Member("cell/x", "hardlink", "BESIDE/sentinel.txt", 0), RUN),
    (RUN, Member("cell/x", "symlink", "config.json", 0)),
    (RUN, Member("cell/x", "symlink", "nowhere", 0)),
    (RUN, Member("cell/x", "pipe", "", 0)),
    (RUN, Member("cell/x", "device", "", 0)),
    (RUN, Member("cell/config.json", "folder", "", 0)),
    (RUN, Member("cell/x", "file", "", 30)),
    (RUN, Member("cell/config.json", "file", "", 25)),
    (RUN, Member("x" * 300, "file", "", 21)),
)


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMAND_LINES, ids=lambda line: line[:60])
def test_command_line(line: str, sandbox: Sandbox) -> None:
    examine("cases", sandbox, shlex.split(line))


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "line"), DAMAGED, ids=str)
def test_damaged_folder(damage: tuple[Tamper, ...], line: str, sandbox: Sandbox) -> None:
    told = "; ".join(map(str, damage))
    examine("cases", sandbox, shlex.split(line), lambda place: [tamper.apply(place) for tamper in damage], told)


@pytest.mark.parametrize("members", HOSTILE, ids=lambda members: "-".join(member.kind for member in members))
@pytest.mark.parametrize("end", ["whole", *slow("truncated")])
def test_hostile_archive(members: tuple[Member, ...], end: str, sandbox: Sandbox) -> None:
    archive = Archive("hostile.tar.gz", members, end)
    line = ("suite", "merge", "hostile.tar.gz", "--out", "merged")
    examine("cases", sandbox, line, archive.write, str(archive))
