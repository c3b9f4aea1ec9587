"""The grammar behind the demo model's training text: what SmolLM2 is asked, how its answer begins, and our own facts.

`prompts(seed)` yields (instruction, opening) without end. The opening is put in the answer's mouth, so that every text
starts differently and without preamble; text = opening + what the teacher goes on with.
`facts(seed)` yields finished short texts that need no teacher.
"""
import random

NAMES = """Tom Lily Ben Anna Max Mia Sam Lucy Jack Emma Leo Ruby Tim Sara Oscar Nora Finn Ella Hugo Clara Peter Rosa Adam Ivy Luke
Alice Henry Maya Will Zoe Omar Aisha Kofi Amara Ravi Priya Chen Mei Diego Sofia Yuki Hana Ali Leila Pablo Ines Noah Eva
Felix Greta Ned Molly Theo Daisy George Kate Harry Jane Paul Mary Bob Sue Dan Amy Joe Beth Nick Rose""".split()
ANIMALS = """cat dog fox rabbit bear mouse owl duck frog squirrel hen lamb pony puppy kitten bird turtle hedgehog deer pig goat cow
horse lion elephant monkey penguin bee butterfly fish whale crab snail wolf otter beaver robin crow swan goose donkey""".split()
PEOPLE = """boy girl farmer baker teacher king queen princess fisherman gardener grandmother grandfather carpenter painter doctor
nurse sailor shepherd tailor cook postman driver singer builder pilot student librarian shopkeeper woodcutter robot
wizard giant fairy knight mother father brother sister neighbor friend""".split()
TRAITS = """little brave kind shy curious clever lazy happy sad lonely old young tiny big funny quiet proud gentle hungry sleepy
clumsy careful friendly grumpy greedy busy poor rich wise silly small tired cheerful patient honest playful""".split()
PLACES = """forest|village|small town|farm|garden|house by the sea|castle|school|city|mountain|river|lake|island|meadow|valley|park|
kitchen|library|market|cave|beach|barn|cottage|old mill|train station|harbor|desert|jungle|snowy hill|bakery""".replace("\n", "").split("|")
THINGS = """red ball|golden key|old book|lost kite|small boat|apple tree|broken clock|wooden box|blue hat|magic stone|bright star|lamp|
warm coat|letter|map|cake|bicycle|toy train|basket of eggs|silver ring|little bell|umbrella|bridge|drum|piano|candle|
jar of honey|loaf of bread|bag of seeds|pair of shoes|picture|door in the wall|shell|feather|wagon|ladder|mirror|swing|
bucket|flute|pumpkin|snowman|rope|pencil|blanket""".replace("\n", "").split("|")
EVENTS = """finds a friend|gets lost and finds the way home|learns to share|helps someone in need|makes a mistake and says sorry|
learns to be patient|is afraid of the dark|wants to learn to swim|plants a garden|bakes a cake|builds a house|goes to the market|
loses something important|shares the last piece of bread|tells the truth|wins a race|helps a stranger|has a birthday|
cannot sleep|sees snow for the first time|goes on a trip|catches a fish|learns to read|saves a bird|cleans the house|
finds a treasure|makes a new toy|meets a giant|visits grandmother|learns to ride a bicycle|waits for the rain|
looks for the moon|makes music|paints a picture|learns to cook|goes to school for the first time|misses the bus|
gives a present|follows a river|climbs a hill|forgives a friend|fixes something broken|keeps a promise""".replace("\n", "").split("|")
FEELINGS = "happy|sad|excited|worried|surprised|tired|proud|afraid|curious|angry|glad|lonely|hungry|bored".split("|")
WEATHER = "sunny|rainy|cold|warm|windy|snowy|cloudy|foggy|bright|quiet|hot|stormy".split("|")
TIMES = """one day|one morning|one evening|one summer day|one winter night|last week|yesterday|on Sunday|in the spring|after school|
late at night|early in the morning|at noon|on a rainy day|on her birthday""".replace("\n", "").split("|")
SUBJECTS = """cats|dogs|the sun|the moon|rain|snow|the sea|rivers|mountains|trees|flowers|bread|milk|apples|water|fire|wind|clouds|
birds|fish|bees|cows|horses|sheep|chickens|elephants|lions|whales|bears|frogs|butterflies|farmers|bakers|teachers|
doctors|firefighters|libraries|schools|trains|boats|bicycles|cars|airplanes|houses|bridges|books|music|paint|letters|clocks|
spring|summer|autumn|winter|morning|night|breakfast|dinner|sleep|friends|family|games|gardens|farms|cities|villages|
forests|deserts|islands|stars|the Earth|the sky|colors|numbers|seasons|food|soup|cheese|eggs|honey|tea|salt|
sugar|paper|wood|glass|stone|gold|wool|shoes|hats|coats|umbrellas|chairs|tables|beds|windows|doors|lamps|kitchens|markets|
money|holidays|birthdays|weather|thunder|rainbows|leaves|seeds|roots|insects|spiders|snakes|turtles|penguins|owls|
hands|eyes|ears|teeth|the heart|sports|football|swimming|running|walking|reading|writing|cooking|cleaning|painting|
singing|dancing|teaching|helping others|computers|telephones|maps|ships|tools|wheels|electricity|ice|sand|soil|air""".replace("\n", "").split("|")
ACTIVITIES = """make a cup of tea|plant a seed|wash the dishes|make a sandwich|cook an egg|clean a room|write a letter|ride a bicycle|
feed a cat|walk a dog|read a book|pack a bag|bake bread|draw a house|cross the street|brush your teeth|make a bed|
grow tomatoes|build a snowman|make a friend|say sorry|borrow a book|buy vegetables|set the table|make soup|
learn a song|fly a kite|catch a bus|wrap a present|take care of a plant|make a fire|tell a story|save money|
keep a promise|fall asleep|stay healthy|learn a new word|help at home|count to ten|paint a wall""".replace("\n", "").split("|")


def article(noun):
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def story(r):
    name, friend = r.sample(NAMES, 2)
    trait, animal, person, place = r.choice(TRAITS), r.choice(ANIMALS), r.choice(PEOPLE), r.choice(PLACES)
    thing, event = r.choice(THINGS), r.choice(EVENTS)
    hero = animal if r.random() < 0.5 else person
    what = r.choice([f"{article(trait)} {hero} who {event}", f"{article(hero)} and {article(thing)}", f"{name}, {article(hero)} who {event}",
                     f"{name} and {friend} in the {place}", f"{article(trait)} {hero} in a {place}", f"how {name} the {hero} {event}",
                     f"{article(hero)}, a {place} and {article(thing)}"])
    ask = r.choice(["Write a short, simple story for a small child about {}. Use short sentences and easy words.",
                    "Tell me a very short bedtime story about {}. Use simple words.",
                    "Write a little story in simple English about {}. Keep it short, with a clear ending.",
                    "Write a story of about eight sentences about {}. Use words that a young child knows.",
                    "Tell a simple story with a happy ending about {}. Write one or two short paragraphs."]).format(what)
    s = r.choice([f"Once upon a time, there was {article(trait)} {hero} named {name}", f"Once upon a time, in a {place}, there lived {article(trait)} {hero}",
                  f"{name} was {article(trait)} {hero}", f"{name} the {hero} lived in a {place}", f"There once was {article(hero)} who",
                  f"{r.choice(TIMES).capitalize()}, {name} found {article(thing)}", f"{r.choice(TIMES).capitalize()}, {article(trait)} {hero}",
                  f"It was a {r.choice(WEATHER)} day. {name} and {friend}", f"It was a {r.choice(WEATHER)} {r.choice(['morning', 'evening', 'afternoon', 'night'])} in the {place}",
                  f"{name} and {friend} were", f"{name} had {article(thing)}", f"{name} was very {r.choice(FEELINGS)}", f"The {trait} {hero}",
                  f"In a {place}, there was {article(thing)}", f"{name} wanted to", f"Long ago, {article(person)}", f"{name}'s best friend was {article(animal)}",
                  f"Every morning, {name}", f"A {hero} and {article(animal)}", f"\"{r.choice(['Hello', 'Look', 'Come here', 'Help', 'Wait', 'Good morning', 'Oh no', 'Listen'])}",
                  "Once upon a time", "Once upon a time, there was a"])
    return ask, s


def subject(r):
    s, name = r.choice(SUBJECTS), r.choice(NAMES)
    ask = r.choice(["Tell a young child in a few simple sentences about {}.", "Write five short, simple and true sentences about {}.",
                    "Write a short, simple paragraph about {} for a child who learns to read.", "Why do people like {}? Answer in simple words, in one short paragraph.",
                    "Describe {} in a few plain sentences.", "Explain in easy words, in one paragraph: {}."]).format(s)
    cap = s[0].upper() + s[1:]
    return ask, r.choice([cap, cap, cap, f"{cap} can", f"We all know {s}", f"People like {s} because", f"The first thing to know about {s} is", f"When we think of {s}, we",
                          "There are many", "Every day", "In the", "Did you know that", f"I like {s}", "Some people", "Most people", f"{name} likes {s}"])


def daily(r):
    a, name, friend = r.choice(ACTIVITIES), *r.sample(NAMES, 2)
    kind = r.randrange(4)
    if kind == 0:
        return f"Explain to a child in one simple paragraph, without a list, how to {a}.", r.choice([f"To {a}, you", f"To {a}, first", "First, you", "It is easy to " + a + "."])
    if kind == 1:
        return (f"Write a simple paragraph about a normal day of {article(r.choice(PEOPLE))} named {name}.",
                r.choice([f"{name} wakes up", f"Every day, {name}", f"{name} gets up early", f"In the morning, {name}", f"My name is {name}"]))
    if kind == 2:
        return (f"Write a short, simple conversation between {name} and {friend} about {r.choice(SUBJECTS)}. Use quotation marks.",
                r.choice([f"\"Hello, {friend},\" said {name}.", f"{name} looked at {friend}.", f"\"{friend}, do you", f"{name} asked {friend},", f"One day, {name} said to {friend},"]))
    return (f"Write a short paragraph in simple English about the {r.choice(PLACES)} on a {r.choice(WEATHER)} day.",
            r.choice(["The sun", "The sky", "It was a", "The children", "The wind", "The people", "There is a", "We went to the", "I walked", "The old", "My family and I", "The water", "A small"]))


def prompts(seed):
    r = random.Random(seed)
    while True:
        p = r.random()
        yield (story if p < 0.68 else subject if p < 0.85 else daily)(r)


CAPITALS = """France Paris|Italy Rome|Spain Madrid|Germany Berlin|England London|Portugal Lisbon|Greece Athens|Egypt Cairo|Japan Tokyo|
China Beijing|India New Delhi|Russia Moscow|Canada Ottawa|Mexico Mexico City|Brazil Brasilia|Argentina Buenos Aires|Chile Santiago|
Peru Lima|Kenya Nairobi|Nigeria Abuja|Ghana Accra|Turkey Ankara|Iran Tehran|Iraq Baghdad|Sweden Stockholm|Norway Oslo|Denmark Copenhagen|
Finland Helsinki|Poland Warsaw|Austria Vienna|Hungary Budapest|Belgium Brussels|Ireland Dublin|Scotland Edinburgh|Wales Cardiff|
Australia Canberra|Cuba Havana|Thailand Bangkok|Vietnam Hanoi|Switzerland Bern|Ukraine Kyiv|Morocco Rabat|Ethiopia Addis Ababa""".replace("\n", "")
SOUNDS = "cow moos|dog barks|cat meows|sheep bleats|horse neighs|duck quacks|pig grunts|lion roars|bee buzzes|owl hoots|frog croaks|wolf howls|hen clucks|bird sings|mouse squeaks|snake hisses"
BABIES = "cow calf|dog puppy|cat kitten|sheep lamb|horse foal|duck duckling|pig piglet|lion cub|hen chick|deer fawn|goat kid|goose gosling|frog tadpole|bear cub|swan cygnet"
OPPOSITES = """hot cold|big small|up down|day night|happy sad|fast slow|old young|wet dry|light dark|full empty|open closed|hard soft|high low|long short|
early late|rich poor|strong weak|clean dirty|left right|good bad|near far|heavy light|loud quiet|first last|true false|sweet sour""".replace("\n", "")
COLORS = """sky blue|grass green|snow white|coal black|a lemon yellow|a banana yellow|blood red|milk white|the night sky black|an orange orange|a carrot orange|
a strawberry red|a leaf green|chocolate brown|the sea blue|the sun yellow|a tomato red|salt white|a frog green""".replace("\n", "")
HOMES = "bird nest|bee hive|dog kennel|horse stable|fish sea|bear cave|rabbit burrow|lion den|cow barn|spider web|fox den|frog pond|owl tree|hen henhouse|king castle|farmer farm"
WORKERS = """baker bakes bread|farmer grows food|teacher teaches children|doctor helps sick people|nurse cares for sick people|cook makes meals|tailor sews clothes|
carpenter builds things from wood|pilot flies airplanes|fisherman catches fish|postman brings letters|gardener grows flowers|painter paints pictures|
librarian lends books|driver drives a bus|firefighter puts out fires|singer sings songs|builder builds houses|shepherd looks after sheep|sailor sails a ship""".replace("\n", "")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty".split()


def fact(r):
    pick = lambda table: r.choice(table.split("|")).strip().split(" ", 1)
    kind = r.randrange(11)
    if kind == 0:
        a, b = pick(CAPITALS)
        return r.choice([f"The capital of {a} is {b}.", f"The capital city of {a} is {b}.", f"{b} is the capital of {a}.", f"What is the capital of {a}? The capital of {a} is {b}."])
    if kind == 1:
        a, b = pick(SOUNDS)
        return r.choice([f"A {a} {b}.", f"The {a} {b}.", f"What does {article(a)} do? {article(a).capitalize()} {b}."])
    if kind == 2:
        a, b = pick(BABIES)
        return r.choice([f"A baby {a} is called a {b}.", f"A young {a} is called a {b}.", f"A {b} is a young {a}."])
    if kind == 3:
        a, b = r.sample(pick(OPPOSITES), 2)
        return r.choice([f"The opposite of {a} is {b}.", f"{a.capitalize()} is the opposite of {b}.", f"What is the opposite of {a}? It is {b}."])
    if kind == 4:
        a, b = r.choice(COLORS.split("|")).rsplit(" ", 1)
        a = a.strip()
        the = a if a.split()[0] in ("a", "an", "the") or a in ("snow", "coal", "blood", "milk", "chocolate", "salt") else "the " + a
        return r.choice([f"{the.capitalize()} is {b}.", f"The color of {the} is {b}.", f"What color is {the}? {the.capitalize()} is {b}."])
    if kind == 5:
        a, b = pick(HOMES)
        return r.choice([f"The {a} lives in a {b}." if b != "sea" else "The fish lives in the sea.", f"Where does the {a} live? The {a} lives in {'the' if b == 'sea' else 'a'} {b}."])
    if kind == 6:
        a, b = pick(WORKERS)
        return r.choice([f"A {a} {b}.", f"The {a} {b}.", f"What does a {a} do? A {a} {b}."])
    if kind == 7:
        i = r.randrange(7)
        return r.choice([f"After {DAYS[i]} comes {DAYS[(i + 1) % 7]}.", f"The day after {DAYS[i]} is {DAYS[(i + 1) % 7]}.", f"The day before {DAYS[(i + 1) % 7]} is {DAYS[i]}.",
                         "There are seven days in a week. They are " + ", ".join(DAYS[:6]) + " and Sunday."])
    if kind == 8:
        i = r.randrange(12)
        return r.choice([f"After {MONTHS[i]} comes {MONTHS[(i + 1) % 12]}.", f"The month after {MONTHS[i]} is {MONTHS[(i + 1) % 12]}.",
                         "There are twelve months in a year. They are " + ", ".join(MONTHS[:11]) + " and December."])
    if kind == 9:
        i = r.randrange(0, 11)
        j = r.randrange(0, 11)
        word = r.random() < 0.5
        a, b, c = (NUMBERS[i], NUMBERS[j], NUMBERS[i + j]) if word else (str(i), str(j), str(i + j))
        return r.choice([f"{a.capitalize()} plus {b} is {c}.", f"{a.capitalize()} and {b} make {c}.", f"What is {a} plus {b}? It is {c}."])
    i = r.randrange(0, 11)
    n = r.randrange(4, 10)
    return r.choice([", ".join(NUMBERS[i:i + n]).capitalize() + ".", "I can count: " + ", ".join(NUMBERS[1:n + 1]) + "."])


def facts(seed):
    """Between one and six facts a text."""
    r = random.Random(seed)
    while True:
        yield " ".join(fact(r) for _ in range(r.choice([1, 1, 2, 3, 6])))
