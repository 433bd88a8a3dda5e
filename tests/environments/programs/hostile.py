"""A program that does what the column `fault` of its row names, before or after it asks the policy once. It uses plain
HTTP, so that it starts quickly."""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

ROW = json.loads(Path(os.environ["TUNIX_LIKE_ROW"]).read_text())
URL = os.environ["OPENAI_BASE_URL"]
KEY = os.environ["OPENAI_API_KEY"]


def ask(text="ab", key=KEY, url=URL, body=None, route="/chat/completions"):
    """Returns status and body of the answer to a request."""
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname, place.port)
    content = json.dumps({"messages": [{"role": "user", "content": text}]}) if body is None else body
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connection.request("POST", place.path + route, content, headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def end(reward):
    print(json.dumps({"reward": reward}))


def foreign_key():
    end(ask(key="sk-other")[0] * 1000 + ask()[0])


def other_trajectory():
    """Sends its key to the endpoint of the other trajectory of its row."""
    folder = Path(ROW["folder"])
    own = folder / str(os.getpid())
    (folder / "new").mkdir(exist_ok=True)
    (folder / "new" / own.name).write_text(URL)
    (folder / "new" / own.name).rename(own)
    while len(found := [each for each in folder.iterdir() if each.is_file()]) < 2:
        time.sleep(0.01)
    other = next(each.read_text() for each in found if each != own)
    end(ask(url=other)[0] * 1000 + ask()[0])


def differs():
    """Asks something else in the second process that comes here."""
    try:
        Path(ROW["folder"], "first").touch(exist_ok=False)
        text = "ab"
    except FileExistsError:
        text = "cd"
    end(ask(text)[0])


def own_answer():
    """Continues its conversation, and tells the length of the first answer and its own number."""
    said = ask("a" * ROW["length"])[1]["choices"][0]["message"]["content"]
    messages = [{"role": "user", "content": "a" * ROW["length"]}, {"role": "assistant", "content": said}]
    ask(body=json.dumps({"messages": [*messages, {"role": "user", "content": "b"}]}))
    end(len(said) + 10 * ROW["length"])


def strangers():
    """Opens more connections to its endpoint than it may have, without a key, and then asks."""
    place = urllib.parse.urlsplit(URL)
    held = [socket.create_connection((place.hostname, place.port)) for _ in range(400)]
    status = ask()[0]
    closed = 0
    for each in held:
        each.settimeout(0.0)
        try:
            closed += not each.recv(1)
        except BlockingIOError:
            continue
    end(status if closed > 100 else closed)


def many_requests():
    """Ignores that its requests are refused."""
    statuses = [ask("a" * (1 + n % 3))[0] for n in range(ROW["count"])]
    end(statuses.count(200))


def many_at_once():
    statuses = []

    def one(n):
        try:
            statuses.append(ask("a" * (1 + n % 3))[0])
        except OSError:
            statuses.append(0)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(ROW["count"])]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    end(statuses.count(200))


def double_fork():
    """Leaves a process in a session of its own, whose parent has ended, and ends well."""
    ask()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(ROW["folder"], "pid").write_text(str(os.getpid()))
            os.execvp("sleep", ["sleep", "1000"])
        os._exit(0)
    while not Path(ROW["folder"], "pid").exists():
        time.sleep(0.01)
    end(1.0)


def silence():
    print("about to think", flush=True)
    time.sleep(1000)


def late_silence():
    ask()
    print("about to think", flush=True)
    time.sleep(1000)


def giant_body():
    """One body is larger than a request may be, the other is a conversation that no row holds."""
    huge = ask(body=b"x" * (9 << 20))[0]
    end(huge * 1_000_000 + ask("a" * 600_000)[0] * 1000 + ask()[0])


def no_json():
    bad = [ask(body=body)[0] for body in (b"{", b"[1]", b"[" * 100_000, b'{"messages": [{"role": "user"}]}')]
    end(sum(bad) + ask()[0] * 10_000)


def odd_text():
    """Half a surrogate pair, which no tokenizer encodes."""
    end(ask("a\ud800b")[0])


def no_route():
    end(ask(route="/files")[0] * 1000 + ask()[0])


def crash():
    ask()
    print("the last words")
    sys.stdout.flush()
    os.abort()


def status():
    ask()
    print("no more ideas", file=sys.stderr)
    sys.exit(3)


def status_after_the_limit():
    while ask()[0] == 200:
        pass
    sys.exit(3)


def words():
    ask()
    print('{"reward": 5}\nall done')


def noise():
    """Prints a warning after its reward, as libraries do at the end."""
    ask()
    end(1.0)
    sys.stdout.flush()
    print("a warning", file=sys.stderr)


def wrong_reward():
    ask()
    print('{"reward": "high"}')


def infinite_reward():
    ask()
    print('{"reward": NaN}')


def memory():
    ask()
    held = bytearray(400_000_000)
    time.sleep(1000)
    print(len(held))


def no_request():
    end(1.0)


def kills_its_group():
    ask()
    os.killpg(0, 9)


def background():
    """Ends although a process that it has started holds its output open."""
    ask()
    subprocess.Popen(["sleep", "1000"])
    end(1.0)


def gone():
    """Sends two requests, and breaks off the second, as a client does after its time limit."""
    first = threading.Thread(target=ask)
    first.start()
    while first.is_alive() and not Path(ROW["folder"], "asked").exists():
        time.sleep(0.01)
    place = urllib.parse.urlsplit(URL)
    connection = http.client.HTTPConnection(place.hostname, place.port)
    body = json.dumps({"messages": [{"role": "user", "content": "cd"}]})
    connection.request("POST", place.path + "/chat/completions", body, {"authorization": f"Bearer {KEY}"})
    time.sleep(0.2)
    connection.close()
    Path(ROW["folder"], "closed").touch()
    first.join()
    end(1.0)


globals()[ROW["fault"]]()
